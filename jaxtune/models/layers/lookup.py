"""Embedding lookup, with a gradient that is summed in float32.

Shape letters: b rows of the batch, s positions in a row, v rows of the table, d features.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxtune.parallel.layout import P, by_token


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

    def sum_by_token(dy, tokens):
        # A token's gradients are summed at its first position, in a float32 array (tokens, d). Each sum is then written
        # to the table once.
        dy, tokens = dy.reshape(-1, dy.shape[-1]).astype(jnp.float32), tokens.reshape(-1)
        places, rows = jnp.arange(len(tokens)), len(table)
        first = jnp.full(rows, len(tokens)).at[tokens].min(places)[tokens]  # first position of the same token
        sums = jnp.zeros_like(dy).at[first].add(dy).astype(table.dtype)
        row = jnp.where(first == places, tokens, rows + places)  # later positions of a token: past the table, dropped
        gradient = jnp.zeros(table.shape, table.dtype).at[row].set(sums, mode="drop", unique_indices=True)
        return jax.lax.psum(gradient, jax.tree.leaves(tuple(by_token())))  # over the axes that divide tokens

    on_devices = jax.shard_map(sum_by_token, in_specs=(by_token(None), by_token()), out_specs=P(None, None))
    return on_devices(dy, jax.reshard(tokens, by_token())), None


lookup.defvjp(_forward, _backward)
