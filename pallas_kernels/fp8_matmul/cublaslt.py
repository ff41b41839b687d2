"""FP8 by cuBLASLt: a dot of FP8 arrays, which XLA rewrites to its call `__cublas$lt$matmul$f8`.

The rewrite needs jax.jit's compiler option xla_gpu_enable_triton_gemm=False; without it XLA compiles the same product
to a Triton fusion. XLA passes the scales to cuBLASLt if there is one per tensor, in the dtype of the result. Other
scales, which may differ by row and by column or would be rounded to bfloat16, multiply the result in float32, in a
separate pass.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.fp8_matmul.reference import spread
from pallas_kernels.fp8_matmul.request import Fp8Request
from pallas_kernels.gpus import Device


def refuses(device: Device, request: Fp8Request) -> str | None:
    """Return why cuBLASLt cannot run a request on a device, or None."""
    if device.capability is None or device.capability < (8, 9):
        return "it needs a GPU with FP8 units (compute capability 8.9 or later)"
    if request.x_scales[1] != 1 or request.weight_scales[1] != 1:
        return (
            f"its scales must be equal along k, of shapes (r, 1), not {request.x_scales} for x and "
            f"{request.weight_scales} for the weight"
        )
    if request.columns % 16 or request.depth % 16:
        return f"weight sizes must be multiples of 16, not {request.columns} x {request.depth}: XLA would pad a copy"
    if request.rows == 1:
        return "XLA compiles a product with a single row to a reduction"
    if request.dtype == jnp.float16:
        return "float16 would overflow before the scales"
    return None


def multiply(
    x: Float[Array, "m k"],
    weight: Float[Array, "n k"],
    x_scale: Float[Array, "r 1"],
    weight_scale: Float[Array, "s 1"],
    request: Fp8Request,
) -> Float[Array, "m n"]:
    """Compute x W^T.

    If XLA does not pass the scales to cuBLASLt, a bfloat16 result is rounded twice: before and after scaling.
    """
    # At the highest precision XLA turns off cuBLASLt's fast accumulation.
    precision = jax.lax.Precision.DEFAULT if request.fast_accumulation else jax.lax.Precision.HIGHEST
    dot = partial(
        jax.lax.dot_general,
        dimension_numbers=(((1,), (1,)), ((), ())),
        precision=precision,
        preferred_element_type=request.dtype,
    )
    if all(scale.size == 1 and scale.dtype == request.dtype for scale in (x_scale, weight_scale)):
        pairs = ((x, x_scale), (weight, weight_scale))
        return dot(*(codes.astype(request.dtype) * scale for codes, scale in pairs))
    product = dot(x, weight)
    scale = spread(x_scale, (request.rows, 1)) * spread(weight_scale, (request.columns, 1)).T
    return (product.astype(jnp.float32) * scale).astype(request.dtype)
