"""Rotation of blocks of 16 by a Hadamard matrix: it spreads an outlier over its block and leaves products unchanged."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

SIZE = 16
# Sylvester's matrix, orthonormal: its elements, 1/4 and -1/4, are exact in every float dtype.
PLAIN = functools.reduce(np.kron, [np.array([[1.0, 1.0], [1.0, -1.0]])] * 4) / np.sqrt(SIZE)
# PLAIN with a random sign per column, drawn once. A block whose signs equal a row of the matrix is rotated into one
# large element. Rows of PLAIN are patterns that real tensors have (all alike, alternating); rows of SIGNED are not.
SIGNED = PLAIN * np.array([1, 1, -1, 1, -1, -1, -1, 1, 1, -1, 1, 1, -1, -1, 1, -1])


def rotate_blocks(x: Float[Array, "m k"], matrix: np.ndarray = PLAIN) -> Float[Array, "m k"]:
    """Multiply each block of 16 elements of a row by an orthonormal matrix, in the dtype of x; k is a multiple of 16.

    rotated(a) rotated(b)^T = a b^T: rotate both sides of a product along the contracted dimension. Raises ValueError
    for any other k, because a block would then reach into the next row.
    """
    if x.shape[1] % SIZE:
        raise ValueError(f"rotated: {x.shape[1]} columns are not a multiple of {SIZE}")
    blocks = x.reshape(-1, SIZE)
    product = jnp.einsum("nk,lk->nl", blocks, jnp.asarray(matrix, x.dtype), precision=jax.lax.Precision.HIGHEST)
    return product.reshape(x.shape)
