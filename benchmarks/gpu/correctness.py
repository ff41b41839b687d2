"""Check every kernel backend that runs on the GPU: all features, forward and gradients, against float64 on the CPU.

An error is norm(result - reference) / norm(reference) of an output or a gradient, over the whole array; the reference
is computed from the same inputs in float64. An unexpected NaN or infinity is an infinite error.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gpu.attention import NAMES, refusal, run_by
from gpu.workers import Job, Piece, Row
from pallas_kernels.flash_attention import MaskSpec, reference
from pallas_kernels.flash_attention.mask import intervals
from pallas_kernels.flash_attention.variant import Variant
from pallas_kernels.linear_cross_entropy import linear_cross_entropy

TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 1e-2}

# Lengths are not multiples of a block. `documents`: their lengths; the rest of a row is padding, filled with NaN.
DEFAULTS = {"queries": 300, "keys": 300, "heads": 4, "kv_heads": 2, "head_dim": 128, "dtype": "bfloat16"}
PACKED = (130, 1, 70, 90)
CASES: dict[str, dict[str, Any]] = {
    "packed": {"documents": PACKED},
    "everything": {"documents": PACKED, "window": 50, "soft_cap": 5.0, "sinks": True, "lse": True},
    "causal": {},
    "full": {"causal": False},
    "window": {"window": 100},
    "packed-window": {"documents": PACKED, "window": 50},
    "soft-cap": {"soft_cap": 5.0},
    "sinks": {"sinks": True},
    "log-sum-exp": {"lse": True},
    "offset": {"queries": 70, "query_offset": 230},
    "one-key-head": {"heads": 8, "kv_heads": 1, "documents": PACKED},
    **{f"head-dim-{size}": {"head_dim": size, "documents": PACKED} for size in (64, 80, 96, 192, 256, 512)},
    "float16": {"dtype": "float16", "documents": PACKED},
    "float32": {"dtype": "float32", "documents": PACKED, "soft_cap": 5.0},
    "float32-head-dim-64": {"dtype": "float32", "documents": PACKED, "head_dim": 64},
}
SMOKE = {"queries": 40, "keys": 40, "head_dim": 16}
SMOKE_CASES: dict[str, dict[str, Any]] = {
    "everything": {**CASES["everything"], **SMOKE, "documents": (17, 1, 18), "window": 9},
}
LOSSES = ("frozen-head", "trained-head")


def piece(smoke: bool) -> Piece:
    """The jobs: backends by features, and the fused loss."""
    cases = SMOKE_CASES if smoke else CASES
    jobs = [
        Job(name, case, __name__, {"contender": name, "name": case, "smoke": smoke}) for name in NAMES for case in cases
    ]
    jobs += [
        Job("loss-xla", case, __name__, {"contender": "loss-xla", "name": case, "smoke": smoke}) for case in LOSSES
    ]
    columns = (
        ("worst error", "worst", ".1e"),
        ("of", "worst_of", ""),
        ("allowed", "tolerance", ".0e"),
    )
    title = "relative error against float64, outputs and gradients"
    environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    return Piece("correctness", title, jobs, columns, 0.10, 60, environment, parallel=not smoke)


def measure(contender: str, name: str, smoke: bool) -> Row:
    """Return the errors of one backend on one case; the job fails if one exceeds the tolerance."""
    if contender == "loss-xla":
        errors, dtype = _loss_errors(name, smoke)
    else:
        case = DEFAULTS | (SMOKE_CASES if smoke else CASES)[name]
        inputs, cotangents, mask = _inputs(case)
        attend = _op(run_by(contender, smoke)[0], mask, case)
        if reason := refusal(attend, *inputs):
            return {"refused": reason}
        errors, dtype = _attention_errors(attend, inputs, cotangents, mask, case), case["dtype"]
    return verdict(errors, TOLERANCE[dtype])


def verdict(errors: dict[str, float], tolerance: float) -> Row:
    """Return a row with all errors and the worst one."""
    worst = max(errors, key=errors.__getitem__)
    row: Row = {"errors": errors, "worst": errors[worst], "worst_of": worst, "tolerance": tolerance}
    if not errors[worst] <= tolerance:
        row["error"] = f"wrong: the relative error of {worst} is {errors[worst]:.1e}, allowed is {tolerance:.0e}"
    return row


def relative_error(found: Any, wanted: Any) -> float:
    """Return norm(found - wanted) / norm(wanted); infinite if their infinities and NaN do not match."""
    found, wanted = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
    finite = np.isfinite(wanted)
    if not np.array_equal(found[~finite], wanted[~finite]) or not np.isfinite(found[finite]).all():
        return float("inf")
    size = float(np.linalg.norm(wanted[finite]))
    return float(np.linalg.norm((found - wanted)[finite])) / (size or 1.0)


def _op(run: Callable, mask: MaskSpec, case: dict[str, Any]) -> Callable[..., tuple]:
    """(q, k, v[, sinks]) -> (out[, lse])."""

    def attend(q, k, v, sinks=None):
        found = run(q, k, v, mask, soft_cap=case.get("soft_cap"), sinks=sinks, return_lse="lse" in case)
        return found if "lse" in case else (found,)

    return attend


def _inputs(case: dict[str, Any]) -> tuple[list, list, MaskSpec]:
    """(q, k, v[, sinks]), the gradients of (out[, lse]) and the mask, for two rows."""
    rows, (queries, keys) = 2, (case["queries"], case["keys"])
    random = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return random.standard_normal(shape, np.float32)

    q, d_out = (normal(rows, queries, case["heads"], case["head_dim"]) for _ in range(2))
    k, v = (normal(rows, keys, case["kv_heads"], case["head_dim"]) for _ in range(2))
    key_start = None
    if "documents" in case:
        lengths = case["documents"]
        starts = np.repeat(np.cumsum((0, *lengths[:-1])), lengths)
        key_start = np.full((rows, queries), keys)
        key_start[:, : starts.size] = starts
        for x in (q, k, v, d_out):
            x[:, starts.size :] = np.nan
        key_start = key_start.astype(np.int32)
    inputs, cotangents = [q, k, v], [d_out]
    if "sinks" in case:
        inputs.append(normal(case["heads"]))
    if "lse" in case:
        cotangents.append(normal(rows, case["heads"], queries))
    inputs = [jnp.asarray(x, case["dtype"]) for x in inputs]
    cotangents = [jnp.asarray(d_out, case["dtype"]), *(jnp.asarray(x) for x in cotangents[1:])]
    most = len(case["documents"]) if "documents" in case else None
    mask = MaskSpec(case.get("causal", True), case.get("window"), key_start, case.get("query_offset", 0), most)
    return inputs, cotangents, mask


def _attention_errors(attend: Callable, inputs: list, cotangents: list, mask: MaskSpec, case: dict) -> dict[str, float]:
    outputs = len(cotangents)
    names = ["out", "lse"][:outputs] + ["dq", "dk", "dv", "d_sinks"][: len(inputs)]

    def wanted(q, k, v, sinks=None):
        variant = Variant(q.shape[-1] ** -0.5, case.get("soft_cap"), mask.causal, mask.window, None)
        first, end = intervals(mask, q.shape[0], q.shape[1], k.shape[1])
        return reference.attention(q, k, v, first, end, sinks, variant, jnp.float64)[:outputs]

    results = _with_gradients(attend, inputs, cotangents)
    references = _in_float64(wanted, inputs, cotangents)
    return {name: relative_error(x, y) for name, x, y in zip(names, results, references, strict=True)}


def _loss_errors(name: str, smoke: bool) -> tuple[dict[str, float], str]:
    tokens, width, rows, vocabulary = (30, 16, 64, 50) if smoke else (1000, 512, 4096, 4000)
    random = np.random.default_rng(0)
    hidden, head = (
        jnp.asarray(random.standard_normal(shape), jnp.bfloat16) for shape in ((tokens, width), (rows, width))
    )
    head *= width**-0.5
    targets = random.integers(0, vocabulary, tokens, np.int32)
    trained = name == "trained-head"

    def found(hidden, head):
        loss = linear_cross_entropy(hidden, head, jnp.asarray(targets), vocabulary=vocabulary, head_gradient=trained)
        return (loss,)

    def wanted(hidden, head):
        logits = hidden @ head[:vocabulary].T
        return (jax.nn.logsumexp(logits, axis=1) - jnp.take_along_axis(logits, targets[:, None], axis=1)[:, 0],)

    inputs, cotangents = [hidden, head], [jnp.asarray(random.standard_normal(tokens), jnp.float32)]
    names = ["loss", "d_hidden", "d_head"][: 2 + trained]
    pairs = zip(_with_gradients(found, inputs, cotangents), _in_float64(wanted, inputs, cotangents))
    return {name: relative_error(x, y) for name, (x, y) in zip(names, pairs)}, "bfloat16"


def _with_gradients(function: Callable, inputs: list, cotangents: list) -> tuple[Any, ...]:
    @jax.jit
    def both(inputs, cotangents):
        outputs, pull = jax.vjp(function, *inputs)
        return *outputs, *pull(tuple(cotangents))

    return both(inputs, cotangents)


def _in_float64(function: Callable, inputs: list, cotangents: list) -> tuple[Any, ...]:
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        wide = [[jnp.asarray(np.asarray(x, np.float64)) for x in arrays] for arrays in (inputs, cotangents)]
        return _with_gradients(function, *wide)
