"""Dropout whose bits are a function of seed, step, global row, layer and site: the same on any mesh."""

import math
import zlib
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxtune.parallel.layout import Axes, shards
from pallas_kernels.manual_axes import varying_axes


def named_key(key: Array, name: str) -> Array:
    """A key for this name: another name, another key."""
    return jax.random.fold_in(key, zlib.crc32(name.encode()) & 0x7FFFFFFF)


class Source(NamedTuple):
    """The randomness of a step: its key, and the part of the rates of dropout that it has; None: all of them."""

    key: Array
    share: Float[Array, ""] | None = None


def source_of(seed: int, step: Int[Array, ""], warmup_steps: int = 0) -> Source:
    """That of a step; the rates of dropout rise linearly from 0 over so many steps."""
    key = jax.random.fold_in(jax.random.key(seed), step)
    return Source(key, jnp.minimum(step / warmup_steps, 1.0) if warmup_steps else None)


class Noise(NamedTuple):
    """Where random bits come from: a key, of a step or of a layer in it, and the global rows of the batch.

    place: the position in its row of each position of whole rows; None: they are in their order. token_of: the token of
    each of the activations, counted over rows of `length` positions; None: all in their order. share: the part that
    this step has of the rates of dropout of the model itself; None: all.
    """

    key: Array
    rows: Int[Array, " b"]
    place: Int[Array, "b s"] | None = None
    token_of: Int[Array, " m"] | None = None
    length: int = 0
    share: Float[Array, ""] | None = None

    def rate(self, most: float) -> float | Float[Array, ""]:
        """The rate of dropout of the model itself in this step."""
        return most if self.share is None else most * self.share

    def layer(self, number: Int[Array, ""]) -> "Noise":
        """The noise of a layer, from that of a step."""
        return self._replace(key=jax.random.fold_in(self.key, number))

    def of_all(self, axes: Axes) -> "Noise":
        """Inside a shard_map: that of the rows of all devices along these axes."""
        gathered = partial(jax.lax.all_gather, axis_name=axes, tiled=True)
        return self._replace(rows=gathered(self.rows), place=jax.tree.map(gathered, self.place))

    def site(self, name: str) -> "Noise":
        """The noise of a named place in a layer."""
        return self._replace(key=named_key(self.key, name))


def dropout(x: Float[Array, "b s i"], rate: float | Float[Array, ""], noise: Noise) -> Float[Array, "b s i"]:
    """Zeros with probability `rate`, the rest scaled up; a row's bits come from its global number in the batch.

    With `token_of` x is (m, 1, i), and each of its rows has the bits of its token.
    """
    divided_by = _axes_of_features(x, noise)
    width = x.shape[2] * shards(divided_by, jax.sharding.get_abstract_mesh())
    length = x.shape[1] if noise.token_of is None else noise.length

    def kept(row: Int[Array, ""]) -> Array:
        return jax.random.bernoulli(jax.random.fold_in(noise.key, row), 1.0 - rate, (length, width))

    keep = jax.vmap(kept)(noise.rows)
    if noise.place is not None:
        keep = jnp.take_along_axis(keep, noise.place[..., None], axis=1)
    if divided_by:
        keep = jax.lax.dynamic_slice_in_dim(keep, jax.lax.axis_index(divided_by) * x.shape[2], x.shape[2], axis=2)
    if noise.token_of is not None:
        keep = jnp.take(keep.reshape(-1, x.shape[2]), noise.token_of, axis=0, mode="clip")[:, None]
    keep = jax.reshard(keep, jax.typeof(x).sharding.spec)
    return jnp.where(keep, x / (1.0 - rate), 0).astype(x.dtype)


def shaken(x: Float[Array, "b s d"], alpha: float, noise: Noise) -> Float[Array, "b s d"]:
    """Embeddings plus uniform noise of at most alpha / sqrt(s * d) (NEFTune, arXiv:2310.05914), as in transformers.

    A row's bits come from its global number in the batch; s is the length of a row, however many documents it holds.
    """
    _, length, width = x.shape

    def drawn(row: Int[Array, ""]) -> Array:
        return jax.random.uniform(jax.random.fold_in(noise.key, row), (length, width), minval=-1.0)

    moved = jax.vmap(drawn)(noise.rows)
    if noise.place is not None:
        moved = jnp.take_along_axis(moved, noise.place[..., None], axis=1)
    moved = jax.reshard(moved, jax.typeof(x).sharding.spec)
    return (x + moved * (alpha / math.sqrt(length * width))).astype(x.dtype)


def _axes_of_features(x: Array, noise: Noise) -> tuple[str, ...]:
    """Inside a shard_map: the mesh axes that divide the features of x, over which x differs and its tokens do not."""
    axes = varying_axes(x) - varying_axes(noise.rows, noise.token_of)
    return tuple(axis for axis in jax.sharding.get_abstract_mesh().axis_names if axis in axes)
