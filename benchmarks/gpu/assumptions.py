"""Measure the rates that the time model of `jaxtune plan` assumes: a program for each rate, and a whole training step.

Each program is compiled, read and timed like a step. The value of its rate is the one with which the model predicts the
measured time. Some rates (L2, launches outside of graphs) show only together with others; these others are solved
first, from programs that take turns with the rate's own. The result is a calibration: `jaxtune plan --calibration`
reads it from the result file, and the whole step is predicted with it too.

Programs repeat an operation, on different arrays if it reads much, so that neither the start of a program nor data left
in L2 counts. `link`, `latency` and `hidden` of jaxtune/plan/rates.py are not measured, because they need more than one
GPU or cannot be isolated in a program.
"""

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy.optimize import brentq

from gpu import models, train_step
from gpu.attention import refusal
from gpu.predicted import compare_prediction, compile_and_read, known_gpu
from gpu.qwen3 import CONFIGS
from gpu.timing import Call, seconds_per_call
from gpu.workers import Job, Piece, Row
from jaxtune.host.process import DETERMINISTIC_OPTIONS
from jaxtune.plan.calibration import PLAUSIBLE, assumptions, with_value
from jaxtune.plan.rates import SCENARIOS, Rates
from pallas_kernels import cost
from pallas_kernels.flash_attention import MaskSpec, triton
from pallas_kernels.flash_attention.mask import intervals
from pallas_kernels.flash_attention.variant import Variant
from pallas_kernels.fp8_matmul import block_scales, fp8_matmul, quantize
from pallas_kernels.gpus import GPUS

ZERO_INIT = "xla_gpu_enable_dus_accumulator_zero_init_elimination"
POISONED = 2**30  # bytes; several times the memory of the small model
STEPS = 3


@dataclass(frozen=True)
class MeasuredProgram:
    """A program to measure.

    Attributes:
        function: the function to compile.
        arguments: its arguments.
        options: compiler options.
        chain: whether the argument is donated and each run gets the previous run's result.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    chain: bool = False


def _normal(*shapes: tuple[int, ...]) -> list[jax.Array]:
    """bfloat16 arrays, scaled so that a product summed over the last axis has unit variance."""
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return [jax.random.normal(key, shape, jnp.bfloat16) * shape[-1] ** -0.25 for key, shape in zip(keys, shapes)]


def _pairs(case: str, smoke: bool, count: int) -> tuple[list[jax.Array], list[jax.Array]]:
    """(m, k) and (n, k) arrays for a case MxNxK."""
    m, n, k = (max(16, int(size) // 64) if smoke else int(size) for size in case.split("x"))
    return _normal(*[(m, k)] * count), _normal(*[(n, k)] * count)


def _products(case: str, smoke: bool) -> MeasuredProgram:
    return MeasuredProgram(lambda xs, ws: [x @ w.T for x, w in zip(xs, ws)], _pairs(case, smoke, 8))


def _fp8_products(case: str, smoke: bool) -> MeasuredProgram:
    def in_fp8(x):
        scale = block_scales(x, (None, None))
        return quantize(x, scale), scale

    def products(xs, ws):
        backend = "xla" if smoke else "cublaslt"
        return [fp8_matmul(x, w, x_scale, w_scale, backend=backend) for (x, x_scale), (w, w_scale) in zip(xs, ws)]

    xs, ws = _pairs(case, smoke, 8)
    return MeasuredProgram(products, ([in_fp8(x) for x in xs], [in_fp8(w) for w in ws]))


def _passes(case: str, smoke: bool) -> MeasuredProgram:
    """Passes over an array, each reading the previous result. All results are kept, so that they reach memory."""
    count, megabytes = map(int, case.removesuffix("MB").split("x"))

    def passes(x):
        results = []
        for _ in range(count):
            x = jax.lax.optimization_barrier(x * jnp.bfloat16(1.5))
            results.append(x)
        return results

    return MeasuredProgram(passes, (jnp.ones(megabytes * (2 if smoke else 500_000), jnp.bfloat16),))


def _sines(x: jax.Array, count: int) -> jax.Array:
    """Run `count` kernels that take almost no time, each on the previous result."""
    for _ in range(count):
        x = jax.lax.optimization_barrier(jnp.sin(x))
    return x


def _launches(case: str, smoke: bool) -> MeasuredProgram:
    return MeasuredProgram(partial(_sines, count=_count(case, smoke)), (jnp.ones(1024),), chain=True)


def _launches_outside(case: str, smoke: bool) -> MeasuredProgram:
    made = _launches(case, smoke)
    return made if smoke else replace(made, options={"xla_gpu_enable_command_buffer": ""})


def _graphs(case: str, smoke: bool) -> MeasuredProgram:
    """A loop, launched as one graph an iteration, of five kernels with the counter's: the minimum for a graph."""

    def loop(x):
        return jax.lax.scan(lambda x, _: (_sines(x, 4), None), x, None, _count(case, smoke))[0]

    return MeasuredProgram(loop, (jnp.ones(1024),), chain=True)


def _waits(case: str, smoke: bool) -> MeasuredProgram:
    """A loop with a data-dependent end: the host waits for the value in every iteration."""
    count = _count(case, smoke)

    def loop(x):
        with cost.iterations(count):
            return jax.lax.while_loop(lambda x: x[0] < count, lambda x: x + 1, x * 0)

    return MeasuredProgram(loop, (jnp.ones(1024),), chain=True)


def _count(case: str, smoke: bool) -> int:
    return int(case) // (64 if smoke else 1)


def _attention(kernel: str) -> Callable[[str, bool], MeasuredProgram]:
    """Attention over causal rows; a case is rows x length x heads x K/V heads, with head dimension 128."""

    def make(case: str, smoke: bool) -> MeasuredProgram:
        rows, length, heads, kv_heads = (1, 64, 2, 1) if smoke else map(int, case.split("x"))
        head_dim = 16 if smoke else 128
        shapes = [(rows, length, count, head_dim) for count in (heads, kv_heads, kv_heads, heads)]
        q, k, v, d_out = _normal(*shapes)
        variant = Variant(head_dim**-0.5, None, True, None, None)
        seen = intervals(MaskSpec(True), rows, length, length)
        forward = partial(triton.forward, sinks=None, variant=variant, interpret=smoke)
        if kernel == "flash_attention_forward":
            return MeasuredProgram(forward, (q, k, v, *seen))
        out, lse = jax.jit(forward)(q, k, v, *seen)
        delta = jnp.einsum("bshd,bshd->bhs", out, d_out, preferred_element_type=jnp.float32)

        def backward(*arrays):
            dq, dk, dv = triton.backward(*arrays, variant=variant, interpret=smoke)
            return dq if kernel == "flash_attention_dq" else (dk, dv)  # XLA removes the unused kernel

        return MeasuredProgram(backward, (q, k, v, *seen, lse, delta, d_out))

    return make


ROWS_OF_ATTENTION = ("2x2048x32x8", "1x8192x32x8")
# For each rate, the most important first: the function that makes its programs, and their cases. Products are
# m x n x k, with 4096 tokens and the layers of Qwen3-8B.
PROGRAMS: dict[str, tuple[Callable[[str, bool], MeasuredProgram], tuple[str, ...]]] = {
    "sustained": (_products, ("4096x4096x4096", "4096x12288x4096", "4096x4096x12288", "4096x1024x4096")),
    "narrow": (_products, ("4096x16x4096", "4096x4096x16", "16x4096x4096")),
    "bandwidth": (_passes, ("1x1000MB",)),
    "launch": (_launches, ("256",)),
    **{
        f"flash_attention_{kernel}": (_attention(f"flash_attention_{kernel}"), ROWS_OF_ATTENTION)
        for kernel in ("forward", "dq", "dkdv")
    },
    "fp8": (_fp8_products, ("4096x4096x4096", "4096x12288x4096")),
    "l2": (_passes, ("32x16MB",)),
    "stream": (_launches_outside, ("256",)),
    "graph": (_graphs, ("64",)),
    "sync": (_waits, ("64",)),
}
# Rates that must be solved before another one, by the same case if they have it, otherwise by their first case.
BEFORE = {
    "fp8": ("sustained",),
    "l2": ("launch", "bandwidth"),
    "stream": ("launch",),
    "graph": ("launch", "stream"),
    "sync": ("launch", "stream"),
}


def piece(smoke: bool) -> Piece:
    """The jobs: rates by their programs; the step, which gets the rates measured before it; the flag."""
    jobs = [
        Job(rate, case, __name__, {"contender": rate, "case": case, "smoke": smoke})
        for rate, (_, cases) in PROGRAMS.items()
        for case in cases[: 1 if smoke else None]
    ]
    for contender, case in (("step", "tiny" if smoke else "0.6B"), ("zero-init", "small")):
        arguments = {"contender": contender, "case": case, "smoke": smoke}
        jobs.append(Job(contender, case, __name__, arguments, given_rows=contender == "step"))
    columns = (
        ("measured us", "microseconds", ",.1f"),
        ("predicted us", "predicted_microseconds", ",.1f"),
        ("error %", "error_percent", "+.1f"),
        ("assumed", "assumed", ".3g"),
        ("found", "value", ".3g"),
        ("calibrated us", "calibrated_predicted_microseconds", ",.1f"),
        ("error %", "calibrated_error_percent", "+.1f"),
        ("same bits", "same_bits", ""),
    )
    title = "assumptions of jaxtune plan's time model, bfloat16; error: prediction over measurement"
    environment = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.93"}
    return Piece("assumptions", title, jobs, columns, 0.50, 120, environment, conclude=calibration)


def calibration(rows: dict[str, Row]) -> dict[str, float]:
    """Return the median of each rate over its cases."""
    by_rate: dict[str, list[float]] = {}
    for name, row in rows.items():
        if "value" in row:
            by_rate.setdefault(name.split("/")[0], []).append(row["value"])
    return {rate: statistics.median(values) for rate, values in by_rate.items()}


def measure(contender: str, case: str, smoke: bool, rows: dict[str, Row] | None = None) -> Row:
    """Measure a rate and compare the model's prediction of its program; or check the flag; or measure the step."""
    gpu = known_gpu()
    if gpu is None:
        return {"refused": f"the time model has no {jax.devices()[0].device_kind}; there are {', '.join(GPUS)}"}
    if contender == "zero-init":
        return _same_without_zeros(smoke)
    if contender == "step":
        return _step(case, smoke, rows or {})
    reads, calls = {}, {}
    for rate in (*BEFORE.get(contender, ()), contender):
        make, cases = PROGRAMS[rate]
        made = make(case if case in cases else cases[0], smoke)
        if reason := refusal(made.function, *made.arguments):
            return {"refused": reason}
        donated = {"donate_argnums": 0} if made.chain else {}
        compiled, reads[rate] = compile_and_read(made.function, *made.arguments, options=made.options, **donated)
        calls[rate] = Call(_runs(compiled, made), jax.block_until_ready)
    # GPU clocks drop after some time of matrix products, so blocks are long enough to see that.
    seconds = seconds_per_call(calls, *((2, 0.0) if smoke else (7, 0.15)))
    row: Row = {
        "microseconds": 1e6 * seconds[contender],
        "assumed": assumptions(gpu, None)[contender].value,
        "launches": {
            kind: sum(launch.count for launch in reads[contender].program.launches if launch.kind == kind)
            for kind in sorted({launch.kind for launch in reads[contender].program.launches})
        },
        **compare_prediction(reads[contender], seconds[contender]),
    }
    rates, value = SCENARIOS["central"], None
    for rate in calls:
        value, problem = solve(rate, seconds[rate], rates, reads[rate].seconds)
        if value is None:
            return row | ({"implausible": problem} if smoke else {"error": f"wrong: {problem}"})
        rates = with_value(rates, rate, value)
    return row | {"value": value}


def _runs(compiled: jax.stages.Compiled, made: MeasuredProgram) -> Callable[[], Any]:
    if not made.chain:
        return lambda: compiled(*made.arguments)
    held = made.arguments[0]

    def run() -> jax.Array:
        # In place, because a graph must be updated before a launch if its arrays have moved.
        nonlocal held
        held = compiled(held)
        return held

    return run


def solve(rate: str, seconds: float, rates: Rates, predicted: Callable[[Rates], float]) -> tuple[float | None, str]:
    """Return the plausible value of a rate with which the model predicts the measured time, or None and the reason."""
    low, high = PLAUSIBLE[rate]
    at = [predicted(with_value(rates, rate, value)) for value in (low, high)]
    if not min(at) <= seconds <= max(at) or at[0] == at[1]:
        return None, (
            f"{rate} from {low:.4g} to {high:.4g} predicts {1e6 * at[0]:.1f} to {1e6 * at[1]:.1f} us, "
            f"and {1e6 * seconds:.1f} us were measured"
        )
    return brentq(lambda value: predicted(with_value(rates, rate, value)) - seconds, low, high, rtol=1e-6), ""


def _same_without_zeros(smoke: bool) -> Row:
    """Check that steps of a small model do not change by a bit if a scan's stacks are not filled with zeros first.

    Memory is filled with NaN before each step, to expose parts of a stack that are read without having been written.
    """
    jax.set_mesh(models.one_device_mesh(jax.devices()[0]))
    config = CONFIGS["tiny" if smoke else "small"]
    program = models.training(config)
    trained, frozen = models.values(program)
    data = models.batch(np.random.default_rng(0).integers(0, config["vocab_size"], (2, 2, 32 if smoke else 512)))

    state, rate = program.start(trained), jnp.float32(models.RATE)

    def compiled(flag: bool) -> jax.stages.Compiled:
        options = DETERMINISTIC_OPTIONS | {ZERO_INIT: flag}
        return compile_and_read(program.step, state, frozen, data, rate, options=options)[0]

    def results(step: jax.stages.Compiled) -> list[np.ndarray]:
        after, losses = state, []
        for _ in range(STEPS):
            # XLA reuses this memory for its temporaries; the bytes are NaN in every float dtype.
            jnp.full(2**20 if smoke else POISONED, 255, jnp.uint8).block_until_ready().delete()
            after, metrics = step(after, frozen, data, rate)
            losses.append(metrics["loss"])
        return [np.asarray(leaf) for leaf in jax.tree.leaves((losses, after))]

    plain, other = compiled(False), compiled(True)
    filled, again, unfilled = results(plain), results(plain), results(other)
    stacks = (other.as_text() or "").count('"AllocateBuffer"')
    row: Row = {"unfilled_stacks": stacks, "arrays": len(filled), "loss": float(filled[STEPS - 1])}
    if differ := _differing(filled, again):
        return row | {"error": f"wrong: {differ} of {len(filled)} arrays differ between two runs of the same program"}
    if differ := _differing(filled, unfilled):
        return row | {"error": f"wrong: {differ} of {len(filled)} arrays differ with {ZERO_INIT}"}
    if not (stacks or smoke):
        return row | {"error": f"{ZERO_INIT} changed nothing: no stack of the program is left unfilled"}
    return row | {"same_bits": "yes"}


def _differing(first: list[np.ndarray], second: list[np.ndarray]) -> int:
    return sum(a.tobytes() != b.tobytes() for a, b in zip(first, second, strict=True))


def _step(case: str, smoke: bool, rows: dict[str, Row]) -> Row:
    """Measure a LoRA step with `train_step`'s method, and predict it with the rates in `rows`."""
    measured = calibration(rows)
    row = train_step.measure_step(CONFIGS[case], train_step.shape(smoke), 2 if smoke else 7, measured=measured)
    return row | {"microseconds": 1e6 * row["seconds"], "calibrated_with": measured}
