"""Products of one block of rows in plain XLA, over which the XLA backends loop in different orders."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.grouped_matmul.groups import Groups


def in_blocks(rows: Float[Array, "m f"], groups: Groups) -> Float[Array, "n rows f"]:
    """Return the rows by block."""
    return rows.reshape(len(groups.block_group), -1, rows.shape[-1])


def multiply_block(
    block: Float[Array, "rows k"], matrix: Float[Array, "o i"], transposed: bool
) -> Float[Array, "rows n"]:
    """Compute x W^T, or x W if `transposed`, accumulated in float32."""
    dimensions = (((1,), (0 if transposed else 1,)), ((), ()))
    return jax.lax.dot_general(block, matrix, dimensions, precision=_precision(block))


def outer_of_block(dy: Float[Array, "rows o"], x: Float[Array, "rows i"]) -> Float[Array, "o i"]:
    """Return dy x^T, summed over rows, in float32."""
    return jnp.einsum("mo,mi->oi", dy, x, precision=_precision(x), preferred_element_type=jnp.float32)


def _precision(x: Array) -> str | None:
    return "highest" if x.dtype == jnp.float32 else None
