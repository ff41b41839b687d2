"""FP8 products in plain jnp: both sides as float32 values, so correct on every device, but never on FP8 units."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.fp8_matmul.request import Fp8Request


def multiply(
    x: Float[Array, "m k"],
    weight: Float[Array, "n k"],
    x_scale: Float[Array, "r c"],
    weight_scale: Float[Array, "s d"],
    request: Fp8Request,
) -> Float[Array, "m n"]:
    """Compute x W^T of the dequantized sides. XLA may make a float32 copy of the weight."""
    values = (
        codes.astype(jnp.float32) * spread(scale, codes.shape)
        for codes, scale in ((x, x_scale), (weight, weight_scale))
    )
    return jnp.einsum("mk,nk->mn", *values, precision=jax.lax.Precision.HIGHEST).astype(request.dtype)


def spread(scale: Float[Array, "r c"], shape: tuple[int, ...]) -> Float[Array, "m k"]:
    """Broadcast every scale over its block of an array of this shape."""
    (rows, columns), (r, c) = shape, scale.shape
    return jnp.broadcast_to(scale[:, None, :, None], (r, rows // r, c, columns // c)).reshape(shape)
