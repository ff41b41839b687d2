"""Dequantization of the weights of Qwen3-8B to bfloat16: GB/s of every backend, and of bitsandbytes on the same codes.

The bytes count codes and scales, read once, and the weight, written once. A call dequantizes several weights, so that
they come from memory and not from the cache, and so that the cost of starting the call is negligible.
"""

import functools
import importlib.util
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gpu.attention import refusal
from gpu.quantized import Weight, format_named, largest_relative_error, weights, wrong
from gpu.timing import Call, seconds_per_call
from gpu.workers import Job, Piece, Row
from jaxtune.host.process import compiler_options
from pallas_kernels import quant_matmul
from pallas_kernels.gpus import GPUS
from pallas_kernels.quant_matmul import reference, triton
from pallas_kernels.quant_matmul.layout import layout_of

FORMATS = ("nf4", "fp8", "nvfp4", "int8")
SHAPES = ((12_288, 4096), (4096, 12_288), (4096, 4096))
SMOKE_SHAPES = ((128, 256),)
TOTAL = 2**28  # elements of all weights in a call: 0.5 GB are written
CONTENDERS = (*(backend.name for backend in quant_matmul.DEQUANTIZE_BACKENDS), "bitsandbytes")
TOLERANCE = 2.0**-8  # one rounding to bfloat16


def piece(smoke: bool) -> Piece:
    """The jobs: backends and bitsandbytes by formats and shapes."""
    missing = [package for package in ("torch", "bitsandbytes") if not importlib.util.find_spec(package)]
    absent = f"{' and '.join(missing)} not installed" if missing else None
    jobs = []
    for format in FORMATS:
        for shape in SMOKE_SHAPES if smoke else SHAPES:
            for contender in CONTENDERS:
                peer = contender == "bitsandbytes"
                refused = (absent if format == "nf4" else f"it has no {format} like this") if peer else None
                arguments = {"contender": contender, "format": format, "shape": shape, "smoke": smoke}
                jobs.append(Job(contender, f"{format}-{shape[0]}x{shape[1]}", __name__, arguments, refused))
    columns = (
        ("us a weight", "microseconds", ".1f"),
        ("GB/s", "gb_per_second", ",.0f"),
        ("% of memory's", "bandwidth_percent", ".0f"),
    )
    title = "dequantization to bfloat16, bytes read and written"
    return Piece("dequantize", title, jobs, columns, 0.05, 40, {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"})


def measure(contender: str, format: str, shape: tuple[int, int], smoke: bool) -> Row:
    """Return GB/s of one contender, after checking its first weight."""
    count = 2 if smoke else TOTAL // math.prod(shape)
    elements, stored = format_named(format).elements, weights(format, shape, count)
    if contender == "bitsandbytes":
        from gpu.torch_kernels import device

        if not smoke and device() != "cuda":
            return {"refused": "this torch has no CUDA"}
        call, first = _bitsandbytes(stored, shape, format)
    else:
        run = _backend(contender, elements, smoke)
        if reason := refusal(run, *stored[0]):
            return {"refused": reason}
        whole = jax.jit(lambda stored: [run(*weight) for weight in stored], compiler_options=compiler_options())
        call, first = Call(lambda: whole(stored), jax.block_until_ready), whole(stored)[0]
    wanted = jax.jit(functools.partial(reference.weight, elements=elements))(*stored[0])
    row: Row = {"weights": count, "largest_error": largest_relative_error(first, wanted).item()}
    if found := wrong("an element", row["largest_error"], TOLERANCE):
        return row | found
    seconds = seconds_per_call({"own": call}, *((2, 0.0) if smoke else (7, 0.02)))["own"] / count
    row["bytes"] = sum(array.nbytes for array in jax.tree.leaves(stored[0])) + 2 * math.prod(shape)
    row |= {"microseconds": seconds * 1e6, "gb_per_second": row["bytes"] / seconds / 1e9}
    gpu = next((gpu for gpu in GPUS.values() if gpu.kind == jax.devices()[0].device_kind), None)
    if gpu is not None:
        row["bandwidth_percent"] = 100 * row["bytes"] / seconds / gpu.memory_bandwidth
    return row


def _backend(name: str, elements: str, smoke: bool) -> Callable[..., Any]:
    """A function (codes, scales, tensor_scale) -> weight; on a CPU the Triton kernel is interpreted."""
    if smoke and name == "triton":

        def interpreted(codes, scales, tensor_scale):
            layout = layout_of(codes, scales, tensor_scale, elements)
            return triton.dequantize(codes, scales, tensor_scale, layout, jnp.bfloat16, interpret=True)

        return interpreted
    return functools.partial(quant_matmul.dequantize, elements=elements, dtype=jnp.bfloat16, backend=name)


def _bitsandbytes(stored: list[Weight], shape: tuple[int, int], format: str) -> tuple[Call, np.ndarray]:
    """A call of bitsandbytes' dequantize_4bit on the same codes, and the first weight that it returns."""
    import torch
    from bitsandbytes.functional import QuantState, dequantize_4bit

    from gpu.torch_kernels import device, synchronize

    def given(codes, scales, _):
        absmax = torch.tensor(np.asarray(scales).reshape(-1), device=device())
        state = QuantState(
            absmax, torch.Size(shape), blocksize=shape[1] // scales.shape[1], quant_type=format, dtype=torch.bfloat16
        )
        return torch.tensor(np.asarray(codes).reshape(-1, 1), device=device()), state

    theirs = [given(*weight) for weight in stored]

    def run():
        return [dequantize_4bit(codes, state) for codes, state in theirs]

    return Call(run, synchronize), run()[0].float().cpu().numpy()
