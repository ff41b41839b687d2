"""Products with a quantized weight of Qwen3-8B (12288 x 4096): both backends by number of rows, and bfloat16.

forward is x W^T, dx is dy W from the same codes. The plain product takes turns with the quantized one and has the same
weight, rounded to bfloat16. A call with few rows multiplies by several weights, so that they come from memory and not
from the cache, like the layers of a model, and so that the cost of starting the call is negligible.
"""

import functools
from collections.abc import Callable
from itertools import takewhile
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from gpu.attention import refusal
from gpu.quantized import Weight, format_named, largest_error, weights, wrong
from gpu.timing import Call, seconds_per_call
from gpu.workers import REASONS, Job, Piece, Row
from jaxtune.host.process import compiler_options
from pallas_kernels.quant_matmul import BACKENDS, fused, quant_matmul, reference
from pallas_kernels.quant_matmul.layout import layout_of

FORMATS = ("nf4", "fp8")
ROWS = (1, 16, 64, 128, 256, 512, 2048, 4096, 8192, 16_384, 32_768)
SHAPE = (12_288, 4096)
SMOKE_ROWS, SMOKE_SHAPE = (5,), (128, 256)
FEW, WEIGHTS = 512, 4  # up to FEW rows, a call has WEIGHTS weights; otherwise one
PARTS = ("forward", "dx")
# Error of an element over the root mean square: rounding to bfloat16, both of the largest of 4e8 elements and of the
# weights, gives up to 4e-2. A wrong element is off by about 1.
TOLERANCE = 6e-2


def piece(smoke: bool) -> Piece:
    """The jobs: backends by formats and rows."""
    jobs = [
        Job(
            backend.name,
            f"{format}-{rows}",
            __name__,
            {"contender": backend.name, "format": format, "rows": rows, "smoke": smoke},
        )
        for format in (FORMATS[:1] if smoke else FORMATS)
        for rows in (SMOKE_ROWS if smoke else ROWS)
        for backend in BACKENDS
    ]
    columns = tuple(
        column
        for part in PARTS
        for column in (
            (f"{part} us", f"{part}_microseconds", ",.1f"),
            ("bfloat16 us", f"{part}_peer_microseconds", ",.1f"),
            ("over bf16's", f"{part}_over_peer", ".2f"),
        )
    )
    title = f"x W^T and dy W for a quantized W of {SHAPE[0]} x {SHAPE[1]}, by rows; bfloat16: a plain product"
    environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    return Piece("quant_matmul", title, jobs, columns, 0.11, 40, environment, conclude=crossovers)


def crossovers(rows: dict[str, Row]) -> dict[str, Any]:
    """Return the number of rows up to which the fused kernel wins, by format and part (0: never), for tiles.py."""
    limits = {}
    for format in FORMATS:
        for part in PARTS:
            key = f"{part}_over_peer"
            pairs = {
                count: [rows.get(f"{backend}/{format}-{count}", {}).get(key) for backend in ("fused", "dequantize")]
                for count in (*SMOKE_ROWS, *ROWS)
            }
            timed = {count: pair for count, pair in pairs.items() if None not in pair}
            if timed:
                won = takewhile(lambda count: timed[count][0] < timed[count][1], sorted(timed))  # noqa: B023
                limits[f"{format} {part}: rows up to which fused wins"] = max(won, default=0)
    return limits


def measure(contender: str, format: str, rows: int, smoke: bool) -> Row:
    """Time one backend, in turn with the plain product, after checking its result."""
    shape = SMOKE_SHAPE if smoke else SHAPE
    count = WEIGHTS if rows <= FEW else 1
    row: Row = {"weight": shape, "rows": rows, "weights": count}
    for part, size in zip(PARTS, reversed(shape), strict=True):
        x = jax.random.normal(jax.random.key(1), (rows, size), jnp.bfloat16)
        row |= _time(contender, format, shape, count, x, part, smoke)
        if not row.keys().isdisjoint(REASONS):
            break
    return row


def _time(
    contender: str, format: str, shape: tuple[int, int], count: int, x: Array, part: str, smoke: bool
) -> dict[str, Any]:
    elements, transposed = format_named(format).elements, part == "dx"
    stored = weights(format, shape, count)
    product = _product(contender, elements, transposed, smoke)
    if reason := refusal(product, x, *stored[0]):
        return {"refused": reason}
    run = jax.jit(lambda x, stored: [product(x, *weight) for weight in stored], compiler_options=compiler_options())
    error = largest_error(run(x, stored)[0], _wanted(elements, transposed)(x, stored[0])).item()
    if failure := wrong(part, error, TOLERANCE):
        return failure
    plain, plain_run = _plain_weights(format, shape, count), _plain_products(transposed)
    calls = {
        "own": Call(lambda: run(x, stored), jax.block_until_ready),
        "peer": Call(lambda: plain_run(x, plain), jax.block_until_ready),
    }
    seconds = seconds_per_call(calls, *((2, 0.0) if smoke else (7, 0.02)))
    return {
        f"{part}_error": error,
        f"{part}_microseconds": seconds["own"] / count * 1e6,
        f"{part}_peer_microseconds": seconds["peer"] / count * 1e6,
        f"{part}_over_peer": seconds["own"] / seconds["peer"],
    }


def _product(backend: str, elements: str, transposed: bool, smoke: bool) -> Callable[..., Array]:
    """A function (x, codes, scales, tensor_scale) -> x W^T, or x W; on a CPU the fused kernel is interpreted."""
    if smoke and backend == "fused":

        def interpreted(x, codes, scales, tensor_scale):
            layout = layout_of(codes, scales, tensor_scale, elements)
            return fused.multiply(x, codes, scales, tensor_scale, layout, transposed, interpret=True)

        return interpreted

    def product(x, codes, scales, tensor_scale):
        multiply = functools.partial(quant_matmul, elements=elements, backend=backend)
        if not transposed:
            return multiply(x, codes, scales, tensor_scale)
        unused = jnp.zeros((len(x), layout_of(codes, scales, tensor_scale, elements).columns), x.dtype)
        return jax.vjp(lambda unused: multiply(unused, codes, scales, tensor_scale), unused)[1](x)[0]

    return product


@functools.cache
def _wanted(elements: str, transposed: bool) -> Callable[..., Array]:
    """The product in float32 on this device, without any kernel of ours."""

    def wanted(x: Array, stored: Weight) -> Array:
        weight = reference.weight(*stored, elements)
        return jnp.dot(x.astype(jnp.float32), weight if transposed else weight.T, precision=jax.lax.Precision.HIGHEST)

    return jax.jit(wanted, compiler_options=compiler_options())


@functools.cache
def _plain_weights(format: str, shape: tuple[int, int], count: int) -> list[Array]:
    whole = jax.jit(functools.partial(reference.weight, elements=format_named(format).elements))
    return [whole(*weight).astype(jnp.bfloat16) for weight in weights(format, shape, count)]


@functools.cache
def _plain_products(transposed: bool) -> Callable[..., list[Array]]:
    def products(x, plain):
        return [jnp.dot(x, weight if transposed else weight.T) for weight in plain]

    return jax.jit(products, compiler_options=compiler_options())
