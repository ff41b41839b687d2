"""The gated delta rule of Qwen3.5-9B's layers, forward and with gradients, compared with transformers in torch.

FLOPs count the recurrence: the products of a state with keys, values and queries; three times as many with gradients.
"""

import functools
import importlib.util
import inspect
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
from pallas_kernels.gated_delta_rule import BACKENDS, gated_delta_rule, triton

KEY_HEADS, VALUE_HEADS, SIZE = 16, 32, 128
# (rows, positions, documents in a row).
CASES = {"1x4096": (1, 4096, 1), "4x4096": (4, 4096, 1), "4x4096-packed": (4, 4096, 4)}
SMOKE_CASES = {"tiny": (1, 128, 1)}
CONTENDERS = (*(backend.name for backend in BACKENDS), "transformers")
TOLERANCE = 0.1  # error of an element over the root mean square; every product has bfloat16 operands


def piece(smoke: bool) -> Piece:
    """The jobs: backends and transformers by cases."""
    missing = [package for package in ("torch", "transformers") if not importlib.util.find_spec(package)]
    absent = f"{' and '.join(missing)} not installed" if missing else None
    jobs = []
    for case, (_, _, documents) in (SMOKE_CASES if smoke else CASES).items():
        for contender in CONTENDERS:
            peer = contender == "transformers"
            refused = (absent or ("it packs no documents" if documents > 1 else None)) if peer else None
            jobs.append(Job(contender, case, __name__, {"contender": contender, "case": case, "smoke": smoke}, refused))
    columns = (
        ("forward ms", "forward_milliseconds", ".2f"),
        ("TFLOP/s", "forward_tflops", ".1f"),
        ("both ms", "both_milliseconds", ".2f"),
        ("TFLOP/s", "both_tflops", ".1f"),
    )
    title = f"gated delta rule, {KEY_HEADS} heads of keys and {VALUE_HEADS} of values, {SIZE} each, bfloat16"
    return Piece("gated_delta_rule", title, jobs, columns, 0.04, 60, {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"})


def measure(contender: str, case: str, smoke: bool) -> Row:
    """Time one contender, after checking its output."""
    rows, length, documents = (CASES | SMOKE_CASES)[case]
    heads = (1, 2) if smoke else (KEY_HEADS, VALUE_HEADS)
    given = _arguments(rows, length, documents, *heads)
    if contender == "transformers":
        from gpu.torch_kernels import device

        if not smoke and device() != "cuda":
            return {"refused": "this torch has no CUDA"}
        calls, out = _by_transformers(given)
    else:
        run = _backend(contender, smoke)
        if reason := refusal(run, *given):
            return {"refused": reason}
        compiled = functools.partial(jax.jit, compiler_options=compiler_options())
        both = compiled(jax.grad(lambda *given: run(*given).astype(jnp.float32).sum(), tuple(range(5))))
        forward = compiled(run)
        calls = {
            "forward": Call(lambda: forward(*given), jax.block_until_ready),
            "both": Call(lambda: both(*given), jax.block_until_ready),
        }
        out = forward(*given)
    wide = [array.astype(jnp.float32) for array in given[:5]]
    wanted = jax.jit(functools.partial(gated_delta_rule, backend="xla"))(*wide, given[5])[0]
    row: Row = {"largest_error": largest_error(jnp.asarray(out), wanted).item()}
    if failure := wrong("an element", row["largest_error"], TOLERANCE):
        return row | failure
    flops = 6 * rows * length * heads[1] * SIZE * SIZE
    for part, seconds in seconds_per_call(calls, *((2, 0.0) if smoke else (7, 0.02))).items():
        row[f"{part}_milliseconds"] = seconds * 1e3
        row[f"{part}_tflops"] = (1 if part == "forward" else 3) * flops / seconds / 1e12
    return row


def _arguments(rows: int, length: int, documents: int, key_heads: int, value_heads: int) -> tuple[jax.Array, ...]:
    """q, k, v, log_decay, beta, and a mask of the positions at which documents start."""
    keys = jax.random.split(jax.random.key(0), 5)
    q, k = (jax.random.normal(key, (rows, length, key_heads, SIZE), jnp.bfloat16) for key in keys[:2])
    q, k = (each / jnp.linalg.norm(each.astype(jnp.float32), axis=-1, keepdims=True) for each in (q, k))
    v = jax.random.normal(keys[2], (rows, length, value_heads, SIZE), jnp.bfloat16)
    log_decay = -jax.random.uniform(keys[3], v.shape[:3])
    beta = jax.random.uniform(keys[4], v.shape[:3])
    starts = jnp.asarray(np.tile(np.arange(length) % (length // documents) == 0, (rows, 1)))
    return q.astype(v.dtype), k.astype(v.dtype), v, log_decay, beta, starts


def _backend(name: str, smoke: bool) -> Callable[..., Any]:
    """A function that computes the outputs with one backend; on a CPU the Triton kernels are interpreted."""
    if smoke and name == "triton":

        def interpreted(q, k, v, log_decay, beta, starts):
            state = jnp.zeros((len(v), v.shape[2], SIZE, SIZE), jnp.float32)
            return triton.gated_delta_rule(q, k, v, log_decay, beta, starts, state, SIZE**-0.5, interpret=True)[0]

        return interpreted
    return lambda *given: gated_delta_rule(*given, backend=name)[0]


def _by_transformers(given: tuple[jax.Array, ...]) -> tuple[dict[str, Call], Any]:
    """transformers' chunked rule in torch, and its outputs; `unwrap` avoids the kernel package it may prefer."""
    import torch
    from transformers.models.qwen3_next import modeling_qwen3_next

    from gpu.torch_kernels import synchronize

    rule = inspect.unwrap(modeling_qwen3_next.torch_chunk_gated_delta_rule)
    q, k, v, log_decay, beta = (torch.from_dlpack(array).clone().requires_grad_() for array in given[:5])
    repeats = v.shape[2] // k.shape[2]

    def forward():
        wide = (each.repeat_interleave(repeats, dim=2) for each in (q, k))
        return rule(*wide, v, g=log_decay, beta=beta)[0]

    def both():
        return torch.autograd.grad(forward().float().sum(), (q, k, v, log_decay, beta))

    with torch.no_grad():
        out = forward().float().cpu().numpy()
    return {"forward": Call(forward, synchronize), "both": Call(both, synchronize)}, out
