"""Resharding around mixers when positions are sharded.

Over sequence axes, each device has whole rows of some heads inside the mixer (DeepSpeed-Ulysses, Jacobs et al. 2023,
arXiv:2309.14509): an all-to-all before the mixer and one after it exchange positions for heads. Over context axes, each
device keeps its positions, and attention all-gathers keys and values; the loader deals positions to devices so that
each device has the same work.

Shape letters: b rows of the batch, s positions of a device, t positions of a whole row, h heads, d features of a head.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxtune.parallel.layout import RULES, Axes, Entry, P, axes_in, by_head, by_token, shards


@jax.named_scope("collectives")
def to_heads(x: Float[Array, "..."], heads: int, axis: int = 2, *, kept: Axes = ()) -> Float[Array, "..."]:
    """Reshard activations so that each device has whole rows of some heads, or a parameter to its part for these heads.

    `axis` has the features of `heads` heads, one head after another. If the number of devices does not divide the
    number of heads, each head is repeated until it does, as keys and values of several queries are. The axes in `kept`
    continue to shard positions.
    """
    positions, over = by_head(kept)[1:3]
    times = _times(heads, over)
    if times > 1:
        x = _repeat(x, heads, axis, times)
    # Replace the position axes by `positions`, and add them to the heads: XLA makes an all-to-all of the reshard.
    entries = [positions if axes_in(entry) == RULES.value.positions else entry for entry in jax.typeof(x).sharding.spec]
    entries[axis] = over
    return jax.reshard(x, P(*entries))


def heads_on_devices(heads: int) -> int:
    """Return the number of heads after `to_heads`, which may repeat them."""
    return heads * _times(heads, by_head()[2])


def _times(heads: int, over: Entry) -> int:
    parts = shards(axes_in(over), jax.sharding.get_abstract_mesh())
    return parts // math.gcd(parts, heads)


@jax.named_scope("collectives")
def from_heads(x: Float[Array, "b s h *d"]) -> Float[Array, "b s h *d"]:
    """Reshard a mixer's output back to the layout of the rest of the layer, by position."""
    return jax.reshard(x, by_token("heads", *[None] * (x.ndim - 3)))


@jax.named_scope("collectives")
def gather_positions(x: Float[Array, "b s *of"], place: Int[Array, "b t"], axes: Axes) -> Float[Array, "b t *of"]:
    """Inside a shard_map: all-gather whole rows over the given axes, and order them by position.

    place: for each position as devices hold it, its position in the row.
    """
    whole = jax.lax.all_gather(x, axes, axis=1, tiled=True) if axes else x
    # A scatter of 0, 1, 2, ... to `place` gives the inverse permutation.
    order = jnp.broadcast_to(jnp.arange(place.shape[1]), place.shape)
    return deal_positions(whole, jnp.zeros_like(place).at[_rows(place), place].set(order, unique_indices=True))


def deal_positions(x: Float[Array, "b t *of"], place: Int[Array, "b t"]) -> Float[Array, "b t *of"]:
    """Order whole rows as devices hold their positions: the inverse of `gather_positions`, with the same `place`."""
    # unique_indices makes the transpose, a scatter-add, reproducible bit by bit.
    return x.at[_rows(place), place].get(unique_indices=True)


def _rows(place: Int[Array, "b t"]) -> Int[Array, "b 1"]:
    return jnp.arange(len(place))[:, None]


def _repeat(x: Array, heads: int, axis: int, times: int) -> Array:
    """Repeat each head `times` times, with the copies next to each other."""
    before, after, spec = x.shape[:axis], x.shape[axis + 1 :], jax.typeof(x).sharding.spec
    size = x.shape[axis] // heads
    # jax does not infer how a reshape divides a sharded axis. The heads keep its sharding: their features stay
    # together.
    split = P(*spec[: axis + 1], None, None, *spec[axis + 1 :])
    by_head = jnp.reshape(x, (*before, heads, 1, size, *after), out_sharding=split)
    repeated = jnp.broadcast_to(by_head, (*before, heads, times, size, *after), out_sharding=split)
    return jnp.reshape(repeated, (*before, heads * times * size, *after), out_sharding=spec)
