"""Mixers of rows whose positions are sharded.

Over some axes each device has whole rows of some heads (DeepSpeed-Ulysses, Jacobs et al. 2023, arXiv:2309.14509): an
all-to-all before the mixer and one after it exchange positions for heads. Over others each device keeps its positions,
and attention gathers the keys and values of all; the loader has dealt positions so that each has the same work.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxtune.parallel.layout import RULES, Axes, Entry, P, axes_in, by_head, by_token, shards


def to_heads(x: Float[Array, "..."], heads: int, axis: int = 2, *, kept: Axes = ()) -> Float[Array, "..."]:
    """Activations with whole rows of some heads on each device, or a parameter's part for these heads.

    `axis` has the features of so many heads, one head after another. Where the devices do not divide the heads, each
    head is repeated until they do: so are keys and values of several queries. The axes in `kept` go on sharding
    positions.
    """
    positions, over = by_head(kept)[1:3]
    times = _times(heads, over)
    if times > 1:
        x = _repeated(x, heads, axis, times)
    places = [positions if axes_in(entry) == RULES.value.positions else entry for entry in jax.typeof(x).sharding.spec]
    places[axis] = over
    return jax.reshard(x, P(*places))


def heads_on_devices(heads: int) -> int:
    """The number of heads that so many are after `to_heads`."""
    return heads * _times(heads, by_head()[2])


def _times(heads: int, over: Entry) -> int:
    parts = shards(axes_in(over), jax.sharding.get_abstract_mesh())
    return parts // math.gcd(parts, heads)


def from_heads(x: Float[Array, "b s h d"]) -> Float[Array, "b s h d"]:
    """Activations of a mixer where they are in the rest of the layer, by position."""
    return jax.reshard(x, by_token("heads", None))


def gathered(x: Float[Array, "b s *of"], place: Int[Array, "b t"], axes: Axes) -> Float[Array, "b t *of"]:
    """Inside a shard_map: what all devices along these axes have of whole rows, by position.

    place: of each position in the order in which devices hold them, the one in its row.
    """
    whole = jax.lax.all_gather(x, axes, axis=1, tiled=True) if axes else x
    order = jnp.broadcast_to(jnp.arange(place.shape[1]), place.shape)
    return dealt(whole, jnp.zeros_like(place).at[_rows(place), place].set(order, unique_indices=True))


def dealt(x: Float[Array, "b t *of"], place: Int[Array, "b t"]) -> Float[Array, "b t *of"]:
    """Whole rows in the order in which devices hold their positions: the one in its row of each is `place`."""
    return x.at[_rows(place), place].get(unique_indices=True)  # so that its transpose repeats bit by bit


def _rows(place: Int[Array, "b t"]) -> Int[Array, "b 1"]:
    return jnp.arange(len(place))[:, None]


def _repeated(x: Array, heads: int, axis: int, times: int) -> Array:
    """Each head so many times, one after another."""
    before, after, place = x.shape[:axis], x.shape[axis + 1 :], jax.typeof(x).sharding.spec
    size = x.shape[axis] // heads
    apart = P(*place[: axis + 1], None, None, *place[axis + 1 :])
    by_head = jnp.reshape(x, (*before, heads, 1, size, *after), out_sharding=apart)
    repeated = jnp.broadcast_to(by_head, (*before, heads, times, size, *after), out_sharding=apart)
    return jnp.reshape(repeated, (*before, heads * times * size, *after), out_sharding=place)
