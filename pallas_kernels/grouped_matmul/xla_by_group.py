"""Grouped products in plain XLA for CPUs: a loop over groups and, inside, over the blocks of the group.

A weight is copied out of its stack once, its gradient is written to its stack once, and blocks without rows take no
time. The number of iterations depends on the groups; the host of a GPU would wait for each iteration's condition.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.gpus import Device
from pallas_kernels.grouped_matmul.block_product import in_blocks, multiply_block, outer_of_block
from pallas_kernels.grouped_matmul.groups import Groups
from pallas_kernels.manual_axes import vary_over, varying_axes


def refuses(device: Device, request: Any) -> str | None:
    """Return why this backend cannot run on the device, or None if it can."""
    return None if device.platform == "cpu" else "a loop over groups is for CPUs"


def multiply(
    x: Float[Array, "m k"], weight: Float[Array, "g o i"], groups: Groups, transposed: bool
) -> Float[Array, "m n"]:
    """Compute x W^T with the weight of each row's group, or x W if `transposed`, accumulated in float32."""
    blocks = in_blocks(x, groups)

    def of_group(ys: Array, group: tuple[Array, Array, Array]) -> tuple[Array, None]:
        matrix, first, end = group

        def add(number: Array, ys: Array) -> Array:
            block = jax.lax.dynamic_index_in_dim(blocks, number, keepdims=False)
            return jax.lax.dynamic_update_index_in_dim(ys, multiply_block(block, matrix, transposed), number, 0)

        return jax.lax.fori_loop(first, end, add, ys), None

    zeros = jnp.zeros((*blocks.shape[:2], weight.shape[2 if transposed else 1]), x.dtype)
    (zeros,) = vary_over(varying_axes(x, weight), zeros)
    ys, _ = jax.lax.scan(of_group, zeros, (weight, groups.first[:-1], groups.first[1:]))
    return ys.reshape(len(x), -1)


def outer(dy: Float[Array, "m o"], x: Float[Array, "m i"], groups: Groups) -> Float[Array, "g o i"]:
    """Sum dy x^T over the rows of each group, accumulated in float32."""
    blocks = in_blocks(dy, groups), in_blocks(x, groups)

    def of_group(_, group: tuple[Array, Array]) -> tuple[None, Array]:
        def add(number: Array, total: Array) -> Array:
            block = (jax.lax.dynamic_index_in_dim(rows, number, keepdims=False) for rows in blocks)
            return total + outer_of_block(*block)

        zeros = jnp.zeros((dy.shape[-1], x.shape[-1]), jnp.float32)
        (zeros,) = vary_over(varying_axes(dy, x), zeros)
        return None, jax.lax.fori_loop(*group, add, zeros).astype(x.dtype)

    return jax.lax.scan(of_group, None, (groups.first[:-1], groups.first[1:]))[1]
