"""Dropout and NEFTune. Random bits depend on seed, step, global row, layer and site: they are the same on any mesh.

Shape letters: b rows of the batch, s positions in a row, d or i features, m rows of a grouped product.
"""

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
    """Return a key that depends on the given key and a name."""
    # Not hash(): Python seeds it differently in each process.
    return jax.random.fold_in(key, zlib.crc32(name.encode()) & 0x7FFFFFFF)


class StepNoise(NamedTuple):
    """The randomness of a step.

    Attributes:
        key: the random key.
        share: factor on the model's dropout rates in this step, for their warm-up; None: 1.
    """

    key: Array
    share: Float[Array, ""] | None = None


def make_step_noise(seed: int, step: Int[Array, ""], warmup_steps: int = 0) -> StepNoise:
    """Return the randomness of a step; dropout rates rise linearly from 0 over the first `warmup_steps` steps."""
    key = jax.random.fold_in(jax.random.key(seed), step)
    return StepNoise(key, jnp.minimum(step / warmup_steps, 1.0) if warmup_steps else None)


class Noise(NamedTuple):
    """The source of random bits for activations.

    Attributes:
        key: the key of a step, of a layer in it, or of a site in a layer.
        rows: the global row number of each row of the batch.
        place: for each position as devices hold it, its position in the row; whole rows. None: positions are in order.
        token_of: the token of each row of activations, counted over rows of `length` positions; None: in order.
        length: positions of a row, if there is a `token_of`.
        share: factor on the model's dropout rates in this step; None: 1.
    """

    key: Array
    rows: Int[Array, " b"]
    place: Int[Array, "b s"] | None = None
    token_of: Int[Array, " m"] | None = None
    length: int = 0
    share: Float[Array, ""] | None = None

    def rate(self, most: float) -> float | Float[Array, ""]:
        """Return the dropout rate of this step for a full rate of `most`; for dropout of the model, not of adapters."""
        return most if self.share is None else most * self.share

    def layer(self, number: Int[Array, ""]) -> "Noise":
        """Return the noise of a layer, from the noise of a step."""
        return self._replace(key=jax.random.fold_in(self.key, number))

    def of_all(self, axes: Axes) -> "Noise":
        """Inside a shard_map: return the noise of the rows of all devices along the given axes."""
        gathered = partial(jax.lax.all_gather, axis_name=axes, tiled=True)
        return self._replace(rows=gathered(self.rows), place=jax.tree.map(gathered, self.place))

    def site(self, name: str) -> "Noise":
        """Return the noise of a named place in a layer."""
        return self._replace(key=named_key(self.key, name))


def dropout(x: Float[Array, "b s i"], rate: float | Float[Array, ""], noise: Noise) -> Float[Array, "b s i"]:
    """Set elements to zero with probability `rate` and scale up the rest.

    A row's bits depend on its global number in the batch. With `token_of`, x is (m, 1, i), and each of its rows has the
    bits of its token.
    """
    # Bits are drawn for whole rows with all features, and each device takes its part: the same bits on any mesh.
    divided_by = _axes_of_features(x, noise)
    width = x.shape[2] * shards(divided_by, jax.sharding.get_abstract_mesh())
    length = x.shape[1] if noise.token_of is None else noise.length

    def draw(row: Int[Array, ""]) -> Array:
        return jax.random.bernoulli(jax.random.fold_in(noise.key, row), 1.0 - rate, (length, width))

    keep = jax.vmap(draw)(noise.rows)
    # Bits are drawn in the order of the row; devices may hold its positions in another order (data.rows.deal).
    if noise.place is not None:
        keep = jnp.take_along_axis(keep, noise.place[..., None], axis=1)
    if divided_by:
        keep = jax.lax.dynamic_slice_in_dim(keep, jax.lax.axis_index(divided_by) * x.shape[2], x.shape[2], axis=2)
    if noise.token_of is not None:
        # A row without a token has an index past the end. It is zero, whichever bits it gets.
        keep = jnp.take(keep.reshape(-1, x.shape[2]), noise.token_of, axis=0, mode="clip")[:, None]
    keep = jax.reshard(keep, jax.typeof(x).sharding.spec)
    return jnp.where(keep, x.astype(jnp.float32) / (1.0 - rate), 0).astype(x.dtype)


def neftune(x: Float[Array, "b s d"], alpha: float, noise: Noise) -> Float[Array, "b s d"]:
    """Add uniform noise of at most alpha / sqrt(s * d) to embeddings (NEFTune, arXiv:2310.05914), as in transformers.

    A row's bits depend on its global number in the batch; s is the length of a row, however many documents it holds.
    """
    _, length, width = x.shape

    def draw(row: Int[Array, ""]) -> Array:
        return jax.random.uniform(jax.random.fold_in(noise.key, row), (length, width), minval=-1.0)

    values = jax.vmap(draw)(noise.rows)
    if noise.place is not None:
        values = jnp.take_along_axis(values, noise.place[..., None], axis=1)
    values = jax.reshard(values, jax.typeof(x).sharding.spec)
    return (x + values * (alpha / math.sqrt(length * width))).astype(x.dtype)


def _axes_of_features(x: Array, noise: Noise) -> tuple[str, ...]:
    """Inside a shard_map: return the mesh axes that divide the features of x: x varies over them, its tokens do not."""
    axes = varying_axes(x) - varying_axes(noise.rows, noise.token_of)
    return tuple(axis for axis in jax.sharding.get_abstract_mesh().axis_names if axis in axes)
