"""Quantization to FP8 with scales in blocks, for the activations of fp8_matmul."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.fp8_matmul.derivative import without_derivative
from pallas_kernels.fp8_matmul.reference import spread


def block_scales(
    x: Float[Array, "m k"], block: tuple[int | None, int | None] = (None, None), dtype: Any = jnp.float8_e4m3fn
) -> Float[Array, "r c"]:
    """Return the scale of each block of x that fills the FP8 dtype: amax / the largest number of the dtype.

    block: rows and columns of a block; None: all rows or all columns. (None, None) is one scale for the tensor,
    (1, None) one per row; (1, 128) and (128, 128) are DeepSeek-V3's blocks for activations and weights
    (arXiv:2412.19437).

    Scales are float32, and 1 for a block of zeros or of magnitudes too small for float32's normal numbers. Values that
    are not finite are ignored. Raises ValueError if the blocks do not divide x.
    """
    rows = x.shape[0] if block[0] is None else block[0]
    columns = x.shape[1] if block[1] is None else block[1]
    if min(rows, columns) < 1 or x.shape[0] % rows or x.shape[1] % columns:
        raise ValueError(f"block_scales: blocks of {rows} x {columns} do not divide x {x.shape}")
    blocks = jnp.abs(x.astype(jnp.float32)).reshape(x.shape[0] // rows, rows, x.shape[1] // columns, columns)
    scale = jnp.max(blocks, axis=(1, 3), where=jnp.isfinite(blocks), initial=0.0) / float(jnp.finfo(dtype).max)
    return jnp.where(scale < jnp.finfo(jnp.float32).tiny, 1.0, scale)


def quantize(x: Float[Array, "m k"], scale: Float[Array, "r c"], dtype: Any = jnp.float8_e4m3fn) -> Float[Array, "m k"]:
    """Return FP8 codes of x: x / scale rounded to nearest, ties to even; codes * scale approximates x.

    dtype: float8_e4m3fn or float8_e5m2. scale: from `block_scales`, or from earlier steps (delayed scaling). A value
    too large for the scale saturates (at 448 for e4m3, 57344 for e5m2); a value that is not finite becomes NaN. The
    function has no derivative: differentiating it raises TypeError.
    """

    def codes(x, scale):
        limits = jnp.finfo(dtype)
        scaled = x.astype(jnp.float32) / spread(scale, x.shape)
        saturated = jnp.clip(scaled, float(limits.min), float(limits.max))
        # x - x is NaN where x is not finite, and subtracting 0 keeps the sign of -0. jnp.where is not used, because in
        # a rematerialised scan jax would save its constant as an array.
        return (saturated - (x - x)).astype(dtype)

    return without_derivative("quantize", codes)(x, scale)
