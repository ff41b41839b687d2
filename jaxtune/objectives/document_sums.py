"""Sums over the documents of packed rows."""

import jax
from jaxtyping import Array, Float, Int


def of_documents(values: Float[Array, "b s"], segment_ids: Int[Array, "b s"], count: int) -> Float[Array, "b {count}"]:
    """The sum of the values of each document's tokens, in the order of the documents; 0 where a row has fewer.

    A row is whole on a device here: one float32 a token, however long it is.
    """
    rows = jax.P(jax.typeof(values).sharding.spec[0], None)

    def of_row(values: Array, ids: Array) -> Array:
        return jax.ops.segment_sum(values, ids, count + 1)[1:]  # 0 is padding

    on_devices = jax.shard_map(jax.vmap(of_row), in_specs=(rows, rows), out_specs=rows)
    return on_devices(jax.reshard(values, rows), jax.reshard(segment_ids, rows))
