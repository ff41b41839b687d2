"""Grouped products in plain XLA, one block of rows after another: no more work than the rows need, on any device."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.grouped_matmul.groups import Groups
from pallas_kernels.manual_axes import vary_over, varying_axes


def multiply(
    x: Float[Array, "m k"], weight: Float[Array, "g o i"], groups: Groups, transposed: bool
) -> Float[Array, "m n"]:
    """Compute x W^T with the weight of each row's group, or x W if `transposed`, accumulated in float32."""
    blocks = x.reshape(len(groups.block_group), -1, x.shape[-1])
    precision = "highest" if x.dtype == jnp.float32 else None

    def one(_, numbered: tuple[Array, Array]) -> tuple[None, Array]:
        block, group = numbered
        # An index past the last group reads the last weight; such a block has no rows, and its result is set to zero.
        matrix = jax.lax.dynamic_index_in_dim(weight, group, keepdims=False)
        y = jax.lax.dot_general(block, matrix, (((1,), (0 if transposed else 1,)), ((), ())), precision=precision)
        return None, jnp.where(group < len(weight), y, 0)

    _, ys = jax.lax.scan(one, None, (blocks, groups.block_group))
    return ys.reshape(len(x), -1)


def outer(dy: Float[Array, "m o"], x: Float[Array, "m i"], groups: Groups) -> Float[Array, "g o i"]:
    """Sum dy x^T over the rows of each group, accumulated in float32."""
    blocks, precision = len(groups.block_group), "highest" if x.dtype == jnp.float32 else None
    # A running sum for each group: the products of all blocks together would be an array of (blocks, o, i).
    zeros = jnp.zeros((len(groups.first) - 1, dy.shape[-1], x.shape[-1]), jnp.float32)
    (zeros,) = vary_over(varying_axes(dy, x), zeros)

    def one(total: Array, numbered: tuple[Array, Array, Array]) -> tuple[Array, None]:
        dy, x, group = numbered
        product = jnp.einsum("mo,mi->oi", dy, x, precision=precision, preferred_element_type=jnp.float32)
        sum_of_group = jax.lax.dynamic_index_in_dim(total, group, keepdims=False) + product
        return jax.lax.dynamic_update_index_in_dim(total, sum_of_group, group, 0), None

    # Blocks without a group are zeros, so they add nothing to the last group.
    rows = (dy.reshape(blocks, -1, dy.shape[-1]), x.reshape(blocks, -1, x.shape[-1]), groups.block_group)
    return jax.lax.scan(one, zeros, rows)[0].astype(x.dtype)
