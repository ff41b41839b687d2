"""The recurrence of Mamba-2 of Nemotron 3 Nano's and Granite 4 Tiny's layers, forward and with gradients.

FLOPs count the recurrence: the products of a state with what is written and read; three times as many with gradients.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gpu.attention import refusal
from gpu.quantized import largest_error, wrong
from gpu.timing import Call, seconds_per_call
from gpu.workers import Job, Piece, Row
from jaxtune.host.process import compiler_options
from pallas_kernels.mamba2_scan import BACKENDS, mamba2_scan, triton

SIZE, STATE = 64, 128
# (rows, positions, documents in a row, heads, groups).
CASES = {
    "nemotron-1x4096": (1, 4096, 1, 64, 8),
    "nemotron-4x4096-packed": (4, 4096, 4, 64, 8),
    "granite-1x4096": (1, 4096, 1, 48, 1),
}
SMOKE_CASES = {"tiny": (1, 128, 1, 4, 2)}
CONTENDERS = tuple(dict.fromkeys(backend.name for backend in BACKENDS))
TOLERANCE = 0.1  # error of an element over the root mean square; every product has bfloat16 operands


def piece(smoke: bool) -> Piece:
    """The jobs: backends by cases."""
    jobs = [
        Job(contender, case, __name__, {"contender": contender, "case": case, "smoke": smoke}, None)
        for case in (SMOKE_CASES if smoke else CASES)
        for contender in CONTENDERS
    ]
    columns = (
        ("forward ms", "forward_milliseconds", ".2f"),
        ("TFLOP/s", "forward_tflops", ".1f"),
        ("both ms", "both_milliseconds", ".2f"),
        ("TFLOP/s", "both_tflops", ".1f"),
    )
    title = f"Mamba-2, heads of {SIZE}, states of {STATE}, bfloat16"
    return Piece("mamba2_scan", title, jobs, columns, 0.04, 60, {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"})


def measure(contender: str, case: str, smoke: bool) -> Row:
    """Time one contender, after checking its output."""
    rows, length, documents, heads, groups = (CASES | SMOKE_CASES)[case]
    given = _arguments(rows, length, documents, heads, groups)
    run = _backend(contender, smoke)
    if reason := refusal(run, *given):
        return {"refused": reason}
    compiled = functools.partial(jax.jit, compiler_options=compiler_options())
    both = compiled(jax.grad(lambda *given: run(*given).astype(jnp.float32).sum(), tuple(range(6))))
    forward = compiled(run)
    wide = [array.astype(jnp.float32) for array in given[:6]]
    wanted = jax.jit(functools.partial(mamba2_scan, backend="xla"))(*wide, given[6])[0]
    row: Row = {"largest_error": largest_error(jnp.asarray(forward(*given)), wanted).item()}
    if failure := wrong("an element", row["largest_error"], TOLERANCE):
        return row | failure
    calls = {
        "forward": Call(lambda: forward(*given), jax.block_until_ready),
        "both": Call(lambda: both(*given), jax.block_until_ready),
    }
    flops = 4 * rows * length * heads * SIZE * STATE
    for part, seconds in seconds_per_call(calls, *((2, 0.0) if smoke else (7, 0.02))).items():
        row[f"{part}_milliseconds"] = seconds * 1e3
        row[f"{part}_tflops"] = (1 if part == "forward" else 3) * flops / seconds / 1e12
    return row


def _arguments(rows: int, length: int, documents: int, heads: int, groups: int) -> tuple[jax.Array, ...]:
    """x, step, rate, write, read, skip, and a mask of the positions at which documents start."""
    keys = jax.random.split(jax.random.key(0), 4)
    x = jax.random.normal(keys[0], (rows, length, heads, SIZE), jnp.bfloat16)
    write, read = (jax.random.normal(key, (rows, length, groups, STATE), jnp.bfloat16) for key in keys[1:3])
    step, rate = 0.1 * jax.random.uniform(keys[3], x.shape[:3]), -jnp.arange(1.0, heads + 1)
    starts = jnp.asarray(np.tile(np.arange(length) % (length // documents) == 0, (rows, 1)))
    return x, step, rate, write, read, jnp.ones(heads), starts


def _backend(name: str, smoke: bool) -> Callable[..., Any]:
    """A function that computes the outputs with one backend; on a CPU the Triton kernels are interpreted."""
    if smoke and name == "triton":

        def interpreted(x, *arrays):
            state = jnp.zeros((len(x), x.shape[2], SIZE, STATE), jnp.float32)
            return triton.mamba2_scan(x, *arrays, state, interpret=True)[0]

        return interpreted
    return lambda *given: mamba2_scan(*given, backend=name)[0]
