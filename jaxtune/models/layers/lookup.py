"""Rows of an embedding table, with a gradient that is summed in float32."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxtune.parallel.layout import P, by_token


@jax.custom_vjp
def lookup(table: Float[Array, "v d"], tokens: Int[Array, "b s"]) -> Float[Array, "b s d"]:
    """The row of each token, of a table that is whole on every device.

    Its gradient sums over all positions of a token, in float32 and rounded once, as in torch, but without a float32
    array of the table's size: in bfloat16 the sum of a frequent token would stop growing at 256 times one term.
    """
    return table.at[tokens].get(out_sharding=by_token(None))


def _forward(table, tokens):
    return lookup(table, tokens), (table, tokens)


def _backward(residuals, dy):
    table, tokens = residuals  # of the table only shape and dtype are used, so that XLA keeps none of its values

    def summed(dy, tokens):
        # Positions of one token are summed into the row of the first of them, (tokens, d) in float32; each sum is then
        # written to the table once.
        dy, tokens = dy.reshape(-1, dy.shape[-1]).astype(jnp.float32), tokens.reshape(-1)
        places, rows = jnp.arange(len(tokens)), len(table)
        first = jnp.full(rows, len(tokens)).at[tokens].min(places)[tokens]  # first position of the same token
        sums = jnp.zeros_like(dy).at[first].add(dy).astype(table.dtype)
        own = jnp.where(first == places, tokens, rows + places)  # other positions: past the table, dropped
        gradient = jnp.zeros(table.shape, table.dtype).at[own].set(sums, mode="drop", unique_indices=True)
        return jax.lax.psum(gradient, jax.tree.leaves(tuple(by_token())))

    on_devices = jax.shard_map(summed, in_specs=(by_token(None), by_token()), out_specs=P(None, None))
    return on_devices(dy, jax.reshard(tokens, by_token())), None


lookup.defvjp(_forward, _backward)
