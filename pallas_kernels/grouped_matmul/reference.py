"""Grouped products in plain jnp: the reference of every backend."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.grouped_matmul.groups import Groups


def multiply(
    x: Float[Array, "m k"], weight: Float[Array, "g o i"], groups: Groups, transposed: bool
) -> Float[Array, "m n"]:
    """Compute x W^T with the weight of each row's group, or x W if `transposed`; zeros in rows without a group."""
    group = _group_of_rows(groups, len(x))
    weight = weight.swapaxes(1, 2) if transposed else weight
    row_weights = jnp.take(weight, group, axis=0, mode="fill", fill_value=0)
    return jnp.einsum("mk,mnk->mn", x, row_weights)


def outer(dy: Float[Array, "m o"], x: Float[Array, "m i"], groups: Groups) -> Float[Array, "g o i"]:
    """Sum dy x^T over the rows of each group."""
    group = _group_of_rows(groups, len(x))
    in_group = group[:, None] == jnp.arange(len(groups.first) - 1)
    return jnp.einsum("mg,mo,mi->goi", in_group.astype(x.dtype), dy, x)


def _group_of_rows(groups: Groups, rows: int) -> Array:
    return jnp.repeat(groups.block_group, rows // len(groups.block_group))
