"""Parts of kernels that compute a sequence chunk by chunk: the gated delta rule and Mamba-2."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array

from pallas_kernels.chunks import CHUNK
from pallas_kernels.triton_call import plgpu


def rows_of(chunk: Any) -> pl.Slice:
    """Return the tokens of a chunk."""
    return pl.Slice(chunk * CHUNK, CHUNK)


def pair() -> tuple[Array, Array]:
    """Return the row and the column of each element of a (tokens, tokens) matrix."""
    row, column = (jax.lax.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), axis) for axis in (0, 1))
    return row, column


def ends(
    total_ref: Any, begun_ref: Any, chunk: Any, head: tuple = (), tokens: Any = None
) -> tuple[Array, Array, Array]:
    """Return the decay factors of tokens of a chunk: carried, to_end, through.

    carried: from the state before the chunk to each token. to_end: from each token to the end of the chunk. through:
    from the state before the chunk to its end. All are 0 across documents. `head`: the head, if `total_ref` has
    several. `tokens`: all of the chunk if None.
    """
    tokens, end = rows_of(chunk) if tokens is None else tokens, chunk * CHUNK + CHUNK - 1
    total, begun = plgpu.load(total_ref.at[*head, tokens]), plgpu.load(begun_ref.at[tokens])
    last, documents = plgpu.load(total_ref.at[*head, end]), plgpu.load(begun_ref.at[end])
    # Only tokens of the document that continues from before the chunk (number 0) read the state before the chunk.
    carried = jnp.exp(jnp.where(begun == 0, total, -jnp.inf))
    to_end = jnp.exp(jnp.where(begun == documents, last - total, -jnp.inf))
    return carried, to_end, jnp.exp(jnp.where(documents == 0, last, -jnp.inf))


def dot(a: Array, b: Array) -> Array:
    """Compute a b in the 16-bit dtype of a or b, accumulated in float32."""
    dtype = a.dtype if b.dtype == jnp.float32 else b.dtype
    return plgpu.dot(a.astype(dtype), b.astype(dtype))
