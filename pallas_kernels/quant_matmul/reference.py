"""The dequantized weight and its products in plain jnp: the reference of every backend."""

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt8

from pallas_kernels.quant_matmul.elements import ELEMENTS


def weight(
    codes: UInt8[Array, "o packed"],
    scales: Array,
    tensor_scale: Float[Array, ""] | None,
    elements: str,
    dtype: DTypeLike = jnp.float32,
) -> Float[Array, "o i"]:
    """Return value(code[a, b]) * scale[a // r, b // c] * tensor_scale, computed in `dtype` (float32 or float64)."""
    kind = ELEMENTS[elements]
    if kind.bits == 4:
        codes = jnp.stack([codes >> 4, codes & 15], axis=-1).reshape(len(codes), -1)
    if scales.dtype == jnp.uint8:
        scales = jnp.asarray(ELEMENTS["e4m3"].values, dtype)[scales]
    scales = jnp.repeat(scales.astype(dtype), codes.shape[0] // scales.shape[0], axis=0)
    scales = jnp.repeat(scales, codes.shape[1] // scales.shape[1], axis=1)
    values = jnp.asarray(kind.values, dtype)[codes] * scales
    return values if tensor_scale is None else values * tensor_scale.astype(dtype)


def multiply(x: Float[Array, "m i"], weight: Float[Array, "o i"]) -> Float[Array, "m o"]:
    """Compute x W^T in the dtype of the inputs. jax can differentiate it directly."""
    return jnp.einsum("mi,oi->mo", x, weight)
