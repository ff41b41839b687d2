"""Dropout whose bits are a function of seed, step, global row, layer and site: the same on any mesh."""

import zlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxtune.parallel.layout import shards
from pallas_kernels.manual_axes import varying_axes


def named_key(key: Array, name: str) -> Array:
    """A key for this name: another name, another key."""
    return jax.random.fold_in(key, zlib.crc32(name.encode()) & 0x7FFFFFFF)


class Noise(NamedTuple):
    """Where random bits come from: a key, of a step or of a layer in it, and which tokens a batch has.

    rows: the global row of each row of a batch. first: the position in it where that one begins; None: 0.
    """

    key: Array
    rows: Int[Array, " b"]
    first: Int[Array, " b"] | None = None

    def layer(self, number: Int[Array, ""]) -> "Noise":
        """The noise of a layer, from that of a step."""
        return self._replace(key=jax.random.fold_in(self.key, number))

    def site(self, name: str) -> "Noise":
        """The noise of a named place in a layer."""
        return self._replace(key=named_key(self.key, name))

    def of_tokens(self, positions: Int[Array, "b s"], token_of: Int[Array, " m"]) -> "Noise":
        """The noise of rows of one token each, which have the bits of tokens (b * s) of this batch; no token: any."""
        rows = jnp.broadcast_to(self.rows[:, None], positions.shape)
        return Noise(self.key, *(jnp.take(numbers, token_of, mode="clip") for numbers in (rows, positions)))


def dropout(x: Float[Array, "b s i"], rate: float, noise: Noise) -> Float[Array, "b s i"]:
    """Zeros with probability `rate`, the rest scaled up; a token's bits come from its row in the batch and position."""
    divided_by = _axes_of_features(x, noise)
    width = x.shape[2] * shards(divided_by, jax.sharding.get_abstract_mesh())

    def kept(row: Int[Array, ""], position: Int[Array, ""]) -> Array:
        key = jax.random.fold_in(jax.random.fold_in(noise.key, row), position)
        return jax.random.bernoulli(key, 1.0 - rate, (width,))

    first = jnp.zeros_like(noise.rows) if noise.first is None else noise.first
    keep = jax.vmap(jax.vmap(kept, (None, 0)))(noise.rows, first[:, None] + jnp.arange(x.shape[1]))
    if divided_by:
        start = jax.lax.axis_index(divided_by) * x.shape[2]
        keep = jax.lax.dynamic_slice_in_dim(keep, start, x.shape[2], axis=2)
    keep = jax.reshard(keep, jax.typeof(x).sharding.spec)
    return jnp.where(keep, x / (1.0 - rate), 0).astype(x.dtype)


def _axes_of_features(x: Array, noise: Noise) -> tuple[str, ...]:
    """Inside a shard_map: the mesh axes that divide the features of x, over which x differs and its tokens do not."""
    axes = varying_axes(x) - varying_axes(noise.rows)
    return tuple(axis for axis in jax.sharding.get_abstract_mesh().axis_names if axis in axes)
