"""Fold an adapter into the weight it stands beside."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def merged(
    weight: Float[Array, "... o i"], a: Float[Array, "... r i"], b: Float[Array, "... o r"], scale: float
) -> Float[Array, "... o i"]:
    """W + scale · B A, in float32: rounding to the stored dtype is the caller's, once."""
    product = jnp.einsum(
        "...or,...ri->...oi", b.astype(jnp.float32), a.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST
    )
    return weight.astype(jnp.float32) + scale * product
