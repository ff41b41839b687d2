"""Stochastic rounding to bfloat16, with random bits that are a hash of a key and an element's indices.

An element gets the same bits wherever it is computed: by XLA or in a kernel, and on any mesh.
"""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, BFloat16, Float32, Int, UInt32


def random_bits(key: UInt32[Array, "2"] | tuple[Array, Array], *indices: Int[Array, "..."]) -> UInt32[Array, "..."]:
    """Return 32 bits for each tuple of indices; indices of different shapes are broadcast.

    The hash applies the finaliser of MurmurHash3 (Appleby, in the public domain) once for each word of the key and for
    each index. If only the last index differs between elements, an element costs one finaliser, seven instructions.
    The bits are good for rounding, not for cryptography.
    """
    bits = jnp.uint32(0)
    for word in (key[0], key[1], *indices):
        bits = _mix(bits ^ word.astype(jnp.uint32))
    return bits


def _mix(x: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """Apply a one-to-one function, each bit of whose result depends on all bits of x."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def to_bfloat16(x: Float32[Array, "*shape"], bits: UInt32[Array, "*shape"]) -> BFloat16[Array, "*shape"]:
    """Round each value to one of its two bfloat16 neighbours, the nearer more likely; unbiased (arXiv:2010.06192).

    Infinity stays infinity, and a quiet NaN (the kind that arithmetic makes) stays NaN.
    """
    # bfloat16 is the high half of a float32. The low half plus 16 random bits carries into the high half with
    # probability (low half) / 2^16, which is the value's distance from the lower bfloat16 relative to the gap.
    noise = jnp.where(jnp.abs(x) < jnp.inf, bits >> 16, 0)
    carried = jax.lax.bitcast_convert_type(x, jnp.uint32) + noise
    return jax.lax.bitcast_convert_type((carried >> 16).astype(jnp.uint16), jnp.bfloat16)


def round_to_dtype(x: Float32[Array, "*shape"], dtype: DTypeLike, bits: UInt32[Array, "*shape"]) -> Array:
    """Convert x to a dtype: bfloat16 is rounded stochastically, other dtypes to nearest."""
    return to_bfloat16(x, bits) if dtype == jnp.bfloat16 else x.astype(dtype)
