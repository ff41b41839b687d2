"""Rotations of blocks of 16 by a Hadamard matrix: an outlier is spread over its block, products stay what they are."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

SIZE = 16
# Sylvester's, orthonormal: its elements, 1/4 and -1/4, are exact in every float dtype.
PLAIN = functools.reduce(np.kron, [np.array([[1.0, 1.0], [1.0, -1.0]])] * 4) / np.sqrt(SIZE)
# The columns in random order of sign, drawn once: sign patterns that real tensors have are not those of a column.
SIGNED = PLAIN * np.array([1, 1, -1, 1, -1, -1, -1, 1, 1, -1, 1, 1, -1, -1, 1, -1])


def rotated(x: Float[Array, "m k"], matrix: np.ndarray = PLAIN) -> Float[Array, "m k"]:
    """Each 16 of a row, times an orthonormal matrix; in the dtype of x, k a multiple of 16.

    a b^T is rotated(a) rotated(b)^T: rotate both sides of a product along what it contracts. Raises ValueError for
    another k, which blocks would cross the rows of.
    """
    if x.shape[1] % SIZE:
        raise ValueError(f"rotated: {x.shape[1]} columns are no multiple of {SIZE}")
    blocks = x.reshape(-1, SIZE)
    product = jnp.einsum("nk,lk->nl", blocks, jnp.asarray(matrix, x.dtype), precision=jax.lax.Precision.HIGHEST)
    return product.reshape(x.shape)
