"""Rounding to bfloat16 up or down by chance, so that what is too small for one rounding is not lost in many."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Float32


def round_stochastically(x: Float32[Array, "*shape"], key: Array) -> BFloat16[Array, "*shape"]:
    """One of the two bfloat16 around each value, the nearer one more likely: right on average (arXiv:2010.06192).

    Bits come from the key and an element's place, whatever the sharding. Infinite and NaN stay what they are.
    """
    noise = jax.random.bits(key, x.shape, jnp.uint16, out_sharding=jax.typeof(x).sharding.spec)
    # The 16 bits that bfloat16 lacks, plus as many random ones, carry into those it has.
    carried = (jax.lax.bitcast_convert_type(x, jnp.uint32) + noise) >> 16
    rounded = jax.lax.bitcast_convert_type(carried.astype(jnp.uint16), jnp.bfloat16)
    return jnp.where(jnp.isfinite(x), rounded, x.astype(jnp.bfloat16))
