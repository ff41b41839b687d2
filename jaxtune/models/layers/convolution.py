"""Causal convolution of each channel over packed rows, and the inputs that it needs again in decoding.

Shape letters: b rows of the batch, s positions in a row, t earlier tokens that a token sees (kernel - 1), c channels.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def convolve(
    x: Float[Array, "b s c"],
    kernel: Float[Array, "c 1 t+1"],
    positions: Int[Array, "b s"],
    bias: Float[Array, " c"] | None = None,
    tail: Float[Array, "b t c"] | None = None,
) -> tuple[Float[Array, "b s c"], Float[Array, "b t c"]]:
    """Return the causal convolution of each channel, within documents, and the last t inputs, the next tail.

    It is torch's Conv1d with a group for each channel. Products are summed in float32, and the sum is rounded, as in
    torch. Rows that are decoded together are padded on the left, so none of a tail's inputs that is used is padding.

    tail: the t inputs before x; None: x begins the rows.
    """
    length, size, dtype = x.shape[1], kernel.shape[-1], x.dtype
    before = jnp.zeros((len(x), size - 1, x.shape[-1]), dtype) if tail is None else tail.astype(dtype)
    with_tail = jnp.concatenate([before, x], axis=1)
    total = 0.0 if bias is None else bias.astype(dtype).astype(jnp.float32)
    # A sum of shifted products, because documents end inside a row: a token `back` positions earlier counts only if it
    # is in the same document.
    for back in range(size):
        token = jax.lax.slice_in_dim(with_tail, size - 1 - back, size - 1 - back + length, axis=1).astype(jnp.float32)
        weight = kernel[:, 0, size - 1 - back].astype(dtype).astype(jnp.float32)
        total += jnp.where((positions >= back)[..., None], token * weight, 0)
    return jnp.asarray(total).astype(dtype), with_tail[:, length:]
