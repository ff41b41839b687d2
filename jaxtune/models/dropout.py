"""Dropout whose bits are a function of seed, step, global row, layer and site: the same on any mesh."""

import zlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def named_key(key: Array, name: str) -> Array:
    """A key for this name: another name, another key."""
    return jax.random.fold_in(key, zlib.crc32(name.encode()) & 0x7FFFFFFF)


class Noise(NamedTuple):
    """Where random bits come from: a key, of a step or of a layer in it, and the global rows of the batch."""

    key: Array
    rows: Int[Array, " b"]

    def layer(self, number: Int[Array, ""]) -> "Noise":
        """The noise of a layer, from that of a step."""
        return Noise(jax.random.fold_in(self.key, number), self.rows)

    def site(self, name: str) -> "Noise":
        """The noise of a named place in a layer."""
        return Noise(named_key(self.key, name), self.rows)


def dropout(x: Float[Array, "b s i"], rate: float, noise: Noise) -> Float[Array, "b s i"]:
    """Zeros with probability `rate`, the rest scaled up; a row's bits come from its global number in the batch."""

    def kept(row: Int[Array, ""]) -> Array:
        return jax.random.bernoulli(jax.random.fold_in(noise.key, row), 1.0 - rate, x.shape[1:])

    keep = jax.reshard(jax.vmap(kept)(noise.rows), jax.typeof(x).sharding.spec)
    return jnp.where(keep, x / (1.0 - rate), 0).astype(x.dtype)
