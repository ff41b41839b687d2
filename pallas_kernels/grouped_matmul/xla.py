"""Grouped products in plain XLA, one block of rows after another: no more work than the rows need, on any device.

On a CPU the loop is over groups and, inside, over a group's blocks: a weight is copied out of its stack once, its
gradient is written to its stack once, and blocks without rows take no time. Elsewhere the number of iterations is
static.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.gpus import current_device
from pallas_kernels.grouped_matmul.groups import Groups
from pallas_kernels.manual_axes import vary_over, varying_axes


def multiply(
    x: Float[Array, "m k"], weight: Float[Array, "g o i"], groups: Groups, transposed: bool
) -> Float[Array, "m n"]:
    """Compute x W^T with the weight of each row's group, or x W if `transposed`, accumulated in float32."""
    blocks = x.reshape(len(groups.block_group), -1, x.shape[-1])
    precision = "highest" if x.dtype == jnp.float32 else None

    def product(block: Float[Array, "rows k"], matrix: Float[Array, "o i"]) -> Float[Array, "rows n"]:
        return jax.lax.dot_general(block, matrix, (((1,), (0 if transposed else 1,)), ((), ())), precision=precision)

    def one(_, numbered: tuple[Array, Array]) -> tuple[None, Array]:
        block, group = numbered
        # An index past the last group reads the last weight; such a block has no rows, and its result is set to zero.
        y = product(block, jax.lax.dynamic_index_in_dim(weight, group, keepdims=False))
        return None, jnp.where(group < len(weight), y, 0)

    def of_group(ys: Array, group: tuple[Array, Array, Array]) -> tuple[Array, None]:
        matrix, first, end = group

        def add(number: Array, ys: Array) -> Array:
            block = jax.lax.dynamic_index_in_dim(blocks, number, keepdims=False)
            return jax.lax.dynamic_update_index_in_dim(ys, product(block, matrix), number, 0)

        return jax.lax.fori_loop(first, end, add, ys), None

    if current_device().platform == "cpu":
        zeros = jnp.zeros((*blocks.shape[:2], weight.shape[2 if transposed else 1]), x.dtype)
        (zeros,) = vary_over(varying_axes(x, weight), zeros)
        ys, _ = jax.lax.scan(of_group, zeros, (weight, groups.first[:-1], groups.first[1:]))
    else:
        _, ys = jax.lax.scan(one, None, (blocks, groups.block_group))
    return ys.reshape(len(x), -1)


def outer(dy: Float[Array, "m o"], x: Float[Array, "m i"], groups: Groups) -> Float[Array, "g o i"]:
    """Sum dy x^T over the rows of each group, accumulated in float32."""
    blocks, precision = len(groups.block_group), "highest" if x.dtype == jnp.float32 else None

    def in_blocks(rows: Float[Array, "m f"]) -> Float[Array, "blocks rows f"]:
        return rows.reshape(blocks, -1, rows.shape[-1])

    def zeros(*lead: int) -> Array:
        return vary_over(varying_axes(dy, x), jnp.zeros((*lead, dy.shape[-1], x.shape[-1]), jnp.float32))[0]

    def product(dy: Float[Array, "rows o"], x: Float[Array, "rows i"]) -> Float[Array, "o i"]:
        return jnp.einsum("mo,mi->oi", dy, x, precision=precision, preferred_element_type=jnp.float32)

    def one(total: Array, numbered: tuple[Array, Array, Array]) -> tuple[Array, None]:
        dy, x, group = numbered
        of_block = product(dy, x)
        sum_of_group = jax.lax.dynamic_index_in_dim(total, group, keepdims=False) + of_block
        return jax.lax.dynamic_update_index_in_dim(total, sum_of_group, group, 0), None

    def of_group(_, group: tuple[Array, Array]) -> tuple[None, Array]:
        def add(number: Array, total: Array) -> Array:
            block = (jax.lax.dynamic_index_in_dim(in_blocks(rows), number, keepdims=False) for rows in (dy, x))
            return total + product(*block)

        return None, jax.lax.fori_loop(*group, add, zeros()).astype(x.dtype)

    if current_device().platform == "cpu":
        return jax.lax.scan(of_group, None, (groups.first[:-1], groups.first[1:]))[1]
    # A running sum for each group: the products of all blocks together would be an array of (blocks, o, i).
    # Blocks without a group are zeros, so they add nothing to the last group.
    start = zeros(len(groups.first) - 1)
    return jax.lax.scan(one, start, (in_blocks(dy), in_blocks(x), groups.block_group))[0].astype(x.dtype)
