"""Rows of an embedding table, with a gradient that is summed in float32."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxtune.parallel.layout import ACTIVATIONS, TOKENS, P


@jax.custom_vjp
def lookup(table: Float[Array, "v d"], tokens: Int[Array, "b s"]) -> Float[Array, "b s d"]:
    """The row of each token, of a table that is whole on every device.

    In bfloat16 the sum over the places of a frequent token would stop growing at 256 times one of them. As in torch it
    is float32 and rounded once, here without a float32 array of the table's size.
    """
    return table.at[tokens].get(out_sharding=ACTIVATIONS)


def _forward(table, tokens):
    return lookup(table, tokens), (table, tokens)


def _backward(residuals, dy):
    table, tokens = residuals  # of the table only its type: no value of it is kept

    def summed(dy, tokens):
        dy, tokens = dy.reshape(-1, dy.shape[-1]).astype(jnp.float32), tokens.reshape(-1)
        places, rows = jnp.arange(len(tokens)), len(table)
        first = jnp.full(rows, len(tokens)).at[tokens].min(places)[tokens]  # place of the same token
        sums = jnp.zeros_like(dy).at[first].add(dy).astype(table.dtype)
        own = jnp.where(first == places, tokens, rows + places)  # past the table: dropped
        gradient = jnp.zeros(table.shape, table.dtype).at[own].set(sums, mode="drop", unique_indices=True)
        return jax.lax.psum(gradient, jax.tree.leaves(tuple(TOKENS)))

    on_devices = jax.shard_map(summed, in_specs=(ACTIVATIONS, TOKENS), out_specs=P(None, None))
    return on_devices(dy, jax.reshard(tokens, TOKENS)), None


lookup.defvjp(_forward, _backward)
