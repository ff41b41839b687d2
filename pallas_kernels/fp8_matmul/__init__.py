"""Products of FP8 activations and FP8 weights: the public op, its backends, and quantization of activations to FP8."""

from functools import partial
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import registry
from pallas_kernels.fp8_matmul import cublaslt, reference
from pallas_kernels.fp8_matmul.derivative import without_derivative
from pallas_kernels.fp8_matmul.quantize import block_scales, quantize
from pallas_kernels.fp8_matmul.request import request_for
from pallas_kernels.gpus import current_device
from pallas_kernels.registry import ANY_GPU, Backend, imported_at_call, on_hopper

__all__ = ["BACKENDS", "block_scales", "fp8_matmul", "quantize"]

_MOSAIC = "pallas_kernels.fp8_matmul.mosaic"
# In order of preference. XLA calls cuBLASLt for a plain expression, which tests/kernels checks on a CPU. 'auto' does
# not choose Mosaic until a run on a GPU is recorded in benchmarks/results.
BACKENDS = (
    Backend("cublaslt", cublaslt.multiply, cublaslt.refuses, {ANY_GPU: "tests of the expression"}),
    Backend("mosaic", imported_at_call(_MOSAIC, "multiply"), on_hopper(imported_at_call(_MOSAIC, "refuses")), {}),
    Backend("xla", reference.multiply, registry.never_refuses, {ANY_GPU: "tests"}),
)


def fp8_matmul(
    x: Float[Array, "m k"],
    weight: Float[Array, "n k"],
    x_scale: Float[Array, "r c"],
    weight_scale: Float[Array, "s d"],
    *,
    dtype: Any = jnp.bfloat16,
    fast_accumulation: bool = False,
    backend: str = "auto",
) -> Float[Array, "m n"]:
    """Compute x W^T of FP8 arrays with scales, accumulated in float32 (Micikevicius et al. 2022, arXiv:2209.05433).

    Shapes: m rows of x, k contracted size, n rows of the weight; (r, c) and (s, d) blocks.

    x: float8_e4m3fn or float8_e5m2. weight: float8_e4m3fn. dtype: dtype of the result, bfloat16, float16 or float32.

    x_scale, weight_scale: float32, or the dtype of the result. In the dtype of the result, and with one scale per
    tensor, the product itself can apply the scales, which saves a pass over the result. A scale multiplies the codes of
    a block, whose size is inferred from the shapes: (1, 1) is one scale for the tensor, (m, 1) one per row, and
    (m, k / 128) with (n / 128, k / 128) are the blocks of DeepSeek-V3 (arXiv:2412.19437). `block_scales` makes scales
    and `quantize` makes codes.

    fast_accumulation: let a backend sum over all of k in the tensor core's own registers, which on Hopper have fewer
    bits than float32. This is common in forward passes (Transformer Engine), but not in backward passes.

    `backend`: 'auto', or a name in BACKENDS; 'cublaslt' needs the compiler option xla_gpu_enable_triton_gemm=False.

    The product has no derivative: differentiating it raises TypeError. The backward pass of a frozen FP8 weight
    multiplies by the dequantized weight. Raises ValueError for shapes and dtypes that do not fit together, and for a
    backend that cannot run this on the current device.
    """
    request = request_for(x, weight, x_scale, weight_scale, dtype, fast_accumulation)
    chosen = registry.choose("fp8_matmul", BACKENDS, current_device(), request, backend)
    multiply = without_derivative("fp8_matmul", partial(chosen.run, request=request))
    return multiply(x, weight, x_scale, weight_scale)
