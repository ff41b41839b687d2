"""Products with a quantized weight, which stays quantized in memory: the public ops and their backends."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt8

from pallas_kernels import registry
from pallas_kernels.gpus import current_device
from pallas_kernels.manual_axes import vary_over, varying_axes
from pallas_kernels.quant_matmul import fused, triton, xla
from pallas_kernels.quant_matmul.elements import ELEMENTS
from pallas_kernels.quant_matmul.layout import FLOATS, QuantRequest, WeightLayout, check, layout_of
from pallas_kernels.quant_matmul.tiles import fused_rows
from pallas_kernels.registry import ANY_GPU, Backend

__all__ = ["BACKENDS", "DEQUANTIZE_BACKENDS", "ELEMENTS", "dequantize", "quant_matmul"]

# Both lists of backends are in order of preference.
DEQUANTIZE_BACKENDS = (
    Backend("triton", triton.dequantize, triton.refuses, {ANY_GPU: "interpreted tests"}),
    Backend("xla", xla.dequantize, registry.never_refuses, {ANY_GPU: "tests"}),
)


def dequantize(
    codes: UInt8[Array, "o packed"],
    scales: Array,
    tensor_scale: Float[Array, ""] | None = None,
    *,
    elements: str,
    dtype: DTypeLike,
    backend: str = "auto",
) -> Float[Array, "o i"]:
    """Dequantize a weight from codes and scales to bfloat16, float16 or float32.

        W[a, b] = value(code[a, b]) * scale[a // r, b // c] * tensor_scale

    is computed in float32 (a block's scale times tensor_scale first) and rounded once.

    codes: (o, i), or (o, i / 2) for 4-bit elements, the first of two in the high bits.
    scales: (o / r, i / c), float32, or uint8 with the bits of float8_e4m3fn; the block r x c follows from the shapes.
    elements: the kind of element, a key of ELEMENTS: 'nf4' and 'fp4' (the tables of bitsandbytes), 'e2m1', 'int4',
    'e4m3' (the bits of float8_e4m3fn; its NaN stays NaN), 'int8'.
    backend: 'auto', or a name in DEQUANTIZE_BACKENDS.

    The weight is frozen: all gradients are zero. Raises ValueError for shapes and dtypes that do not fit together, and
    for a backend that cannot run this on the current device.
    """
    layout = layout_of(codes, scales, tensor_scale, elements)
    dtype = jnp.dtype(dtype)
    check(dtype in FLOATS, f"dtype {dtype}; bfloat16, float16 and float32 are supported")
    return _dequantize(codes, scales, tensor_scale, layout, dtype, backend)


@jax.named_scope("dequantization")
def _dequantize(codes, scales, tensor_scale, layout: WeightLayout, dtype: jnp.dtype, backend: str) -> Array:
    request = QuantRequest(layout, dtype)
    chosen = registry.choose("dequantize", DEQUANTIZE_BACKENDS, current_device(), request, backend)
    # Scales are floats, and kernels have no derivative: jax would fail to differentiate through them.
    arrays = jax.lax.stop_gradient((codes, scales, tensor_scale))
    return chosen.run(*vary_over(varying_axes(*arrays), *arrays), layout, dtype)


def _multiply_dequantized(x, codes, scales, tensor_scale, layout: WeightLayout, transposed: bool) -> Array:
    weight = _dequantize(codes, scales, tensor_scale, layout, x.dtype, "auto")
    # float32 must not become TF32. The precision is explicit, because jax.default_matmul_precision may have another
    # value when the backward pass is traced.
    precision = "highest" if x.dtype == jnp.float32 else None
    return jax.lax.dot_general(x, weight, (((1,), (0 if transposed else 1,)), ((), ())), precision=precision)


BACKENDS = (
    Backend("fused", fused.multiply, fused.refuses, {ANY_GPU: "interpreted tests"}),
    Backend("dequantize", _multiply_dequantized, registry.never_refuses, {ANY_GPU: "tests"}),
)


def quant_matmul(
    x: Float[Array, "m i"],
    codes: UInt8[Array, "o packed"],
    scales: Array,
    tensor_scale: Float[Array, ""] | None = None,
    *,
    elements: str,
    backend: str = "auto",
) -> Float[Array, "m o"]:
    """Compute x W^T for the weight of `dequantize`, rounded to x's dtype (bfloat16, float16, float32).

    Products are accumulated in float32. Codes and scales are the only residuals: the gradient of x, dy W, is computed
    from them again. Codes, scales and tensor_scale are frozen: their gradients are zero.

    `backend`: 'auto', or a name in BACKENDS. 'fused' decodes the weight within the product, for few rows. 'dequantize'
    writes the weight once and leaves the product to XLA (on a GPU, cuBLAS, which can read a weight in either
    orientation). 'auto' decides by the number of rows (tiles.py). Raises ValueError as `dequantize` does.
    """
    layout = layout_of(codes, scales, tensor_scale, elements)
    check(x.ndim == 2 and x.shape[1] == layout.columns, f"x {x.shape} must be (rows, {layout.columns}) for this weight")
    check(x.dtype in FLOATS, f"x has dtype {x.dtype}; bfloat16, float16 and float32 are supported")
    check(x.size < 2**31 and len(x) * layout.rows < 2**31, "x or the product has 2^31 elements or more")
    # Marked outside the custom derivative, so that the transpose sums the gradient of an x that devices share.
    arrays = (x, codes, scales, tensor_scale)
    x, codes, scales, tensor_scale = vary_over(varying_axes(*arrays), *arrays)
    return _matmul(x, codes, scales, tensor_scale, layout, backend)


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _matmul(x, codes, scales, tensor_scale, layout: WeightLayout, backend: str) -> Array:
    return _product(x, codes, scales, tensor_scale, layout, backend, transposed=False)


def _forward(x, codes, scales, tensor_scale, layout, backend):
    return _matmul(x, codes, scales, tensor_scale, layout, backend), (codes, scales, tensor_scale)


def _backward(layout, backend, residuals, d_out):
    codes, scales, tensor_scale = residuals
    return _product(d_out, codes, scales, tensor_scale, layout, backend, transposed=True), None, None, None


_matmul.defvjp(_forward, _backward)


def _product(x, codes, scales, tensor_scale, layout: WeightLayout, wanted: str, transposed: bool) -> Array:
    """Compute x W^T, or x W if `transposed`, by the backend for this number of rows."""
    device = current_device()
    backends = BACKENDS if wanted != "auto" or len(x) <= fused_rows(device) else BACKENDS[1:]
    chosen = registry.choose("quant_matmul", backends, device, QuantRequest(layout, x.dtype, len(x)), wanted)
    return chosen.run(x, codes, scales, tensor_scale, layout, transposed)
