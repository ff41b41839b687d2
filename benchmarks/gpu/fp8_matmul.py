"""FP8 activations times an FP8 weight of Qwen3-8B (12288 x 4096): every backend by number of rows, and bfloat16.

cuBLASLt has one scale per tensor, Mosaic one per 1 x 128 block of x and per 128 x 128 block of the weight. The product
of FP8 arrays is timed, and also the quantization of x followed by the product, which is what a layer needs. The
bfloat16 product takes turns with both.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from gpu.attention import refusal
from gpu.quantized import largest_error, wrong
from gpu.timing import Call, seconds_per_call
from gpu.workers import Job, Piece, Row
from jaxtune.host.process import compiler_options
from pallas_kernels.fp8_matmul import block_scales, fp8_matmul, quantize

ROWS = (4096, 8192, 16_384, 32_768)
SHAPE = (12_288, 4096)
SMOKE_ROWS, SMOKE_SHAPE = (24,), (128, 256)
TENSOR, BLOCKS = ((None, None), (None, None)), ((1, 128), (128, 128))  # blocks of x, of the weight
# Scales and options of fp8_matmul, and the largest allowed error of an element over the root mean square: the result is
# rounded to bfloat16, by cuBLASLt twice, and tensor cores accumulate in fewer bits than float32. A wrong element is off
# by about 1.
CONTENDERS: dict[str, tuple[Any, dict[str, Any], float]] = {
    "cublaslt": (TENSOR, {"backend": "cublaslt"}, 0.1),
    "cublaslt-fast": (TENSOR, {"backend": "cublaslt", "fast_accumulation": True}, 0.25),
    "mosaic": (BLOCKS, {"backend": "mosaic"}, 0.1),
}
# This backend multiplies in float32: it is not worth timing on a GPU, but the only one that runs on a CPU.
SMOKE_CONTENDERS = {"xla": (BLOCKS, {"backend": "xla"}, 0.1)}


def piece(smoke: bool) -> Piece:
    """The jobs: backends by rows."""
    contenders = CONTENDERS | (SMOKE_CONTENDERS if smoke else {})
    jobs = [
        Job(name, str(rows), __name__, {"contender": name, "rows": rows, "smoke": smoke})
        for rows in (SMOKE_ROWS if smoke else ROWS)
        for name in contenders
    ]
    columns = (
        ("us", "product_microseconds", ",.0f"),
        ("TFLOP/s", "product_tflops", ",.0f"),
        ("with quantize", "quantized_microseconds", ",.0f"),
        ("bfloat16 us", "peer_microseconds", ",.0f"),
        ("speed-up", "speedup", ".2f"),
        ("with quantize", "quantized_speedup", ".2f"),
    )
    title = f"e4m3 x W^T for W of {SHAPE[0]} x {SHAPE[1]}, by rows; bfloat16: a plain product"
    return Piece("fp8_matmul", title, jobs, columns, 0.05, 40, {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"})


def measure(contender: str, rows: int, smoke: bool) -> Row:
    """Time one backend, after checking its result."""
    (x_block, weight_block), options, tolerance = (CONTENDERS | SMOKE_CONTENDERS)[contender]
    shape = SMOKE_SHAPE if smoke else SHAPE
    compiled = functools.partial(jax.jit, compiler_options=compiler_options())
    keys = jax.random.split(jax.random.key(0))
    x = jax.random.normal(keys[0], (rows, shape[1]), jnp.bfloat16)
    weight = jax.random.normal(keys[1], shape, jnp.bfloat16) * shape[1] ** -0.5

    def in_fp8(x, block):
        scale = block_scales(x, block)
        return quantize(x, scale), scale

    def product(x, weight, **options):
        return fp8_matmul(x[0], weight[0], x[1], weight[1], **options)

    x_codes, weight_codes = (
        compiled(in_fp8, static_argnums=1)(*pair) for pair in ((x, x_block), (weight, weight_block))
    )
    run = compiled(functools.partial(product, **options))
    if reason := refusal(run, x_codes, weight_codes):
        return {"refused": reason}
    wanted = compiled(functools.partial(product, dtype=jnp.float32, backend="xla"))(x_codes, weight_codes)
    row: Row = {
        "weight": shape,
        "rows": rows,
        "largest_error": largest_error(run(x_codes, weight_codes), wanted).item(),
    }
    if found := wrong("an element", row["largest_error"], tolerance):
        return row | found
    del wanted
    with_quantize = compiled(lambda x, weight: product(in_fp8(x, x_block), weight, **options))
    plain = compiled(lambda x, weight: x @ weight.T)
    calls = {
        "product": Call(lambda: run(x_codes, weight_codes), jax.block_until_ready),
        "quantized": Call(lambda: with_quantize(x, weight_codes), jax.block_until_ready),
        "peer": Call(lambda: plain(x, weight), jax.block_until_ready),
    }
    seconds = seconds_per_call(calls, *((2, 0.0) if smoke else (7, 0.02)))
    row |= {f"{name}_microseconds": time * 1e6 for name, time in seconds.items()}
    row["product_tflops"] = 2 * rows * math.prod(shape) / seconds["product"] / 1e12
    row["speedup"] = seconds["peer"] / seconds["product"]
    row["quantized_speedup"] = seconds["peer"] / seconds["quantized"]
    return row
