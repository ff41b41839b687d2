"""Mixers of rows whose positions are sharded: each device has whole rows of some heads (DeepSpeed-Ulysses).

Jacobs et al. 2023, arXiv:2309.14509. An all-to-all before the mixer and one after it exchange positions for heads.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxtune.parallel.layout import RULES, P, axes_in, by_head, by_token, shards


def to_heads(x: Float[Array, "..."], heads: int, axis: int = 2) -> Float[Array, "..."]:
    """Activations with whole rows of some heads on each device, or a parameter's part for these heads.

    `axis` has the features of so many heads, one head after another. Where the devices do not divide the heads, each
    head is repeated until they do: so are keys and values of several queries.
    """
    over = by_head()[2]
    parts = shards(axes_in(over), jax.sharding.get_abstract_mesh())
    times = parts // math.gcd(parts, heads)
    if times > 1:
        x = _repeated(x, heads, axis, times)
    places = [None if axes_in(entry) == RULES.value.positions else entry for entry in jax.typeof(x).sharding.spec]
    places[axis] = over
    return jax.reshard(x, P(*places))


def from_heads(x: Float[Array, "b s h d"]) -> Float[Array, "b s h d"]:
    """Activations of a mixer where they are in the rest of the layer, by position."""
    return jax.reshard(x, by_token("heads", None))


def _repeated(x: Array, heads: int, axis: int, times: int) -> Array:
    """Each head so many times, one after another."""
    before, after, place = x.shape[:axis], x.shape[axis + 1 :], jax.typeof(x).sharding.spec
    size = x.shape[axis] // heads
    apart = P(*place[: axis + 1], None, None, *place[axis + 1 :])
    by_head = jnp.reshape(x, (*before, heads, 1, size, *after), out_sharding=apart)
    repeated = jnp.broadcast_to(by_head, (*before, heads, times, size, *after), out_sharding=apart)
    return jnp.reshape(repeated, (*before, heads * times * size, *after), out_sharding=place)
