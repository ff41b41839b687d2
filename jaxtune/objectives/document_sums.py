"""Sums over the documents of packed rows."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def sum_documents(values: Float[Array, "b s"], segment_ids: Int[Array, "b s"], count: int) -> Float[Array, "b {count}"]:
    """Return the sum of values over each document of a row, in order; 0 for documents that the row does not have.

    Rows are made whole on each device, which costs only one float32 per token.
    """
    rows = jax.P(jax.typeof(values).sharding.spec[0], None)

    def of_row(values: Array, ids: Array) -> Array:
        return jax.ops.segment_sum(values, ids, count + 1)[1:]  # segment 0 is padding

    on_devices = jax.shard_map(jax.vmap(of_row), in_specs=(rows, rows), out_specs=rows)
    return on_devices(jax.reshard(values, rows), jax.reshard(segment_ids, rows))


def sum_own_document(values: Float[Array, "*b s"], segment_ids: Int[Array, "*b s"]) -> Float[Array, "*b s"]:
    """Return, at each token, the sum of values over its document; 0 at padding."""
    here = jax.typeof(values).sharding.spec
    rows = jax.P(*here[:-1], None)

    @partial(jnp.vectorize, signature="(s),(s)->(s)")
    def of_row(values: Array, ids: Array) -> Array:
        return jnp.where(ids > 0, jax.ops.segment_sum(values, ids, len(values) + 1)[ids], 0)

    on_devices = jax.shard_map(of_row, in_specs=(rows, rows), out_specs=rows)
    return jax.reshard(on_devices(jax.reshard(values, rows), jax.reshard(segment_ids, rows)), jax.P(*here))


def mean_where(there: Bool[Array, "b n"], values: Float[Array, "b n"]) -> Float[Array, ""]:
    """Return the mean of the values that are there; 0 if there are none."""
    return jnp.sum(jnp.where(there, values, 0.0)) / jnp.maximum(jnp.sum(there), 1)
