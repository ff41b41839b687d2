"""Grouped products in plain XLA, one block of rows after another: no more work than the rows need, on any device.

The number of iterations is static; blocks without rows are multiplied too.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.grouped_matmul.block_product import in_blocks, multiply_block, outer_of_block
from pallas_kernels.grouped_matmul.groups import Groups
from pallas_kernels.manual_axes import vary_over, varying_axes


def multiply(
    x: Float[Array, "m k"], weight: Float[Array, "g o i"], groups: Groups, transposed: bool
) -> Float[Array, "m n"]:
    """Compute x W^T with the weight of each row's group, or x W if `transposed`, accumulated in float32."""

    def one(_, numbered: tuple[Array, Array]) -> tuple[None, Array]:
        block, group = numbered
        # An index past the last group reads the last weight; such a block has no rows, and its result is set to zero.
        y = multiply_block(block, jax.lax.dynamic_index_in_dim(weight, group, keepdims=False), transposed)
        return None, jnp.where(group < len(weight), y, 0)

    _, ys = jax.lax.scan(one, None, (in_blocks(x, groups), groups.block_group))
    return ys.reshape(len(x), -1)


def outer(dy: Float[Array, "m o"], x: Float[Array, "m i"], groups: Groups) -> Float[Array, "g o i"]:
    """Sum dy x^T over the rows of each group, accumulated in float32."""

    def one(total: Array, numbered: tuple[Array, Array, Array]) -> tuple[Array, None]:
        dy, x, group = numbered
        of_block = outer_of_block(dy, x)
        sum_of_group = jax.lax.dynamic_index_in_dim(total, group, keepdims=False) + of_block
        return jax.lax.dynamic_update_index_in_dim(total, sum_of_group, group, 0), None

    # A running sum for each group: the products of all blocks together would be an array of (blocks, o, i).
    # Blocks without a group are zeros, so they add nothing to the last group.
    zeros = jnp.zeros((len(groups.first) - 1, dy.shape[-1], x.shape[-1]), jnp.float32)
    (zeros,) = vary_over(varying_axes(dy, x), zeros)
    blocks = (in_blocks(dy, groups), in_blocks(x, groups), groups.block_group)
    return jax.lax.scan(one, zeros, blocks)[0].astype(x.dtype)
