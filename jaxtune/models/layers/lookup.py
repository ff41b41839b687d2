"""Embedding lookup, with a gradient that is summed in float32.

Shape letters: b rows of the batch, s positions in a row, v rows of the table, d features.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxtune.parallel.layout import P, axes_in, by_token, shards


@jax.custom_vjp
def lookup(table: Float[Array, "v d"], tokens: Int[Array, "b s"]) -> Float[Array, "b s d"]:
    """Return the row of each token, from a table that is whole on every device.

    A row's gradient is summed over all positions of its token in float32 and rounded once, as in torch, but without a
    float32 array of the table's size. In bfloat16 the sum of a frequent token would stop growing at 256 times one term.
    """
    return table.at[tokens].get(out_sharding=by_token(None))


def _forward(table, tokens):
    return lookup(table, tokens), (table, tokens)


def _backward(residuals, dy):
    table, tokens = residuals  # only the table's shape and dtype are used, so XLA does not keep its values

    def sum_on_device(dy, tokens):
        # Over the axes that divide tokens.
        return jax.lax.psum(_sum_by_token(dy, tokens, len(table), table.dtype), _axes(by_token()))

    on_devices = jax.shard_map(sum_on_device, in_specs=(by_token(None), by_token()), out_specs=P(None, None))
    return on_devices(dy, jax.reshard(tokens, by_token())), None


lookup.defvjp(_forward, _backward)


@jax.custom_vjp
def lookup_in_parts(table: Float[Array, "v d"], tokens: Int[Array, "b s"]) -> Float[Array, "b s d"]:
    """Return the row of each token, from a table that stays sharded; its gradient is summed as `lookup`'s.

    A device looks up its features for the tokens of all devices that have other features of the same rows, and these
    devices exchange features for tokens. That is less to exchange than the table, if it has more rows than they have
    tokens.
    """
    parts = _parts(table)

    def find(table, tokens):
        found = table.at[_own_rows(tokens, len(table), parts.rows)].get(mode="fill", fill_value=0)
        found = jax.lax.psum(found, parts.rows) if parts.rows else found
        for axes, dimension in reversed(parts.exchanged):
            found = jax.lax.all_to_all(found, axes, dimension, 2, tiled=True)
        return found

    on_devices = jax.shard_map(find, in_specs=(parts.table, parts.tokens), out_specs=by_token(None))
    return on_devices(jax.reshard(table, parts.table), jax.reshard(tokens, parts.tokens))


def _forward_in_parts(table, tokens):
    return lookup_in_parts(table, tokens), (table, tokens)


def _backward_in_parts(residuals, dy):
    table, tokens = residuals
    parts = _parts(table)
    count = len(table) // shards(parts.rows, jax.sharding.get_abstract_mesh())

    def sum_on_device(dy, tokens):
        for axes, dimension in parts.exchanged:
            dy = jax.lax.all_to_all(dy, axes, 2, dimension, tiled=True)
        if parts.rows:  # rows of other devices count as the last one here, with a gradient of 0
            tokens = _own_rows(tokens, count, parts.rows)
            dy, tokens = jnp.where((tokens < count)[..., None], dy, 0), jnp.minimum(tokens, count - 1)
        return jax.lax.psum(_sum_by_token(dy, tokens, count, table.dtype), _axes(parts.tokens))

    on_devices = jax.shard_map(sum_on_device, in_specs=(by_token(None), parts.tokens), out_specs=parts.table)
    return jax.reshard(on_devices(dy, jax.reshard(tokens, parts.tokens)), jax.typeof(table).sharding.spec), None


lookup_in_parts.defvjp(_forward_in_parts, _backward_in_parts)


def _axes(spec: jax.P) -> tuple[str, ...]:
    """Return the mesh axes in a PartitionSpec."""
    return tuple(axis for entry in spec for axis in axes_in(entry))


class _Parts(NamedTuple):
    """How a table and the tokens looked up in it are sharded.

    Attributes:
        rows: axes that shard the table's rows.
        table: the table's PartitionSpec.
        tokens: the tokens' PartitionSpec, without the axes that shard the table's features.
        exchanged: these axes, outermost first, with the dimension of the tokens that they shard elsewhere.
    """

    rows: tuple[str, ...]
    table: jax.P
    tokens: jax.P
    exchanged: list[tuple[tuple[str, ...], int]]


def _parts(table: Float[Array, "v d"]) -> _Parts:
    """Return how a table and its tokens are sharded, by axes of more than one device."""
    mesh = jax.sharding.get_abstract_mesh().shape
    rows, features = (
        tuple(axis for axis in axes_in(entry) if mesh[axis] > 1) for entry in jax.typeof(table).sharding.spec
    )
    whole = tuple(map(axes_in, by_token()))
    tokens = P(*(tuple(axis for axis in axes if axis not in features) for axes in whole))
    exchanged = [(tuple(axis for axis in axes if axis in features), i) for i, axes in enumerate(whole)]
    assert features == tuple(axis for axes, _ in exchanged for axis in axes), (features, whole)
    return _Parts(rows, P(rows, features), tokens, [part for part in exchanged if part[0]])


def _own_rows(tokens: Int[Array, "b s"], count: int, axes: tuple[str, ...]) -> Int[Array, "b s"]:
    """Return the rows of tokens in this device's part of a table, of `count` rows; `count` if it has no row of one."""
    if not axes:
        return tokens
    own = tokens - count * jax.lax.axis_index(axes)
    return jnp.where((own >= 0) & (own < count), own, count)


def _sum_by_token(dy: Float[Array, "b s d"], tokens: Int[Array, "b s"], rows: int, dtype) -> Float[Array, "v d"]:
    """Return the gradient of a table on a device."""
    # A token's gradients are summed at its first position, in a float32 array (tokens, d). Each sum is then written to
    # the table once.
    dy, tokens = dy.reshape(-1, dy.shape[-1]).astype(jnp.float32), tokens.reshape(-1)
    places = jnp.arange(len(tokens))
    first = jnp.full(rows, len(tokens)).at[tokens].min(places)[tokens]  # first position of the same token
    sums = jnp.zeros_like(dy).at[first].add(dy).astype(dtype)
    row = jnp.where(first == places, tokens, rows + places)  # later positions of a token: past the table, dropped
    return jnp.zeros((rows, dy.shape[-1]), dtype).at[row].set(sums, mode="drop", unique_indices=True)
