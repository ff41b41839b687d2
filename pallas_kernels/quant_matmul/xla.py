"""Dequantization in plain XLA: one fusion from codes to the requested dtype."""

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt8

from pallas_kernels.quant_matmul.layout import WeightLayout, block_scales


def dequantize(
    codes: UInt8[Array, "o packed"],
    scales: Array,
    tensor_scale: Float[Array, ""] | None,
    layout: WeightLayout,
    dtype: DTypeLike,
) -> Float[Array, "o i"]:
    """Return the dequantized weight, computed in float32."""
    if layout.elements.bits == 4:
        codes = jnp.stack([codes >> 4, codes & 15], axis=-1)
    factor = block_scales(scales, tensor_scale)[:, None, :, None]
    blocks = (-1, layout.block_rows, factor.shape[2], layout.block_columns)
    values = layout.elements.decode(codes.reshape(blocks)) * factor
    return values.reshape(layout.rows, layout.columns).astype(dtype)
