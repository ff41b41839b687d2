"""How a sequence is cut in chunks, and what decays leave between the tokens of one. For kernels too."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

CHUNK = 64


def whole_chunks(x: Array, axis: int) -> Array:
    """Filled up to whole chunks along an axis with zeros: tokens that change nothing."""
    width = [(0, 0)] * x.ndim
    width[axis] = (0, -x.shape[axis] % CHUNK)
    return jnp.pad(x, width)


def summed(
    log_decay: Float[Array, "*b c"], starts: Bool[Array, "*b c"]
) -> tuple[Float[Array, "*b c"], Int[Array, "*b c"]]:
    """For each token the log_decay since its document or the chunk began, and the documents begun in the chunk.

    The decay of a token that starts a document is none. Other documents enter no sum, so that they do not round it.
    """
    begun = jnp.cumsum(starts, axis=-1, dtype=jnp.int32)
    log_decay = jnp.where(starts, 0, log_decay)
    return jnp.sum(jnp.where(_seen(begun), log_decay[..., None, :], 0), axis=-1), begun


def decays(
    total: Float[Array, "*b c"], begun: Int[Array, "*b c"]
) -> tuple[Float[Array, "*b c c"], Float[Array, "*b c"]]:
    """Of `summed`: what is left at a token (first c) of what another wrote, and of the state before the chunk.

    Exactly nothing from a later token or from another document.
    """
    # Chosen before the exponential: that of a later token may be infinite, and its gradient NaN.
    between = jnp.exp(jnp.where(_seen(begun), total[..., :, None] - total[..., None, :], -jnp.inf))
    return between, jnp.exp(jnp.where(begun == 0, total, -jnp.inf))


def _seen(begun: Int[Array, "*b c"]) -> Bool[Array, "*b c c"]:
    token, other = (jax.lax.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), axis) for axis in (0, 1))
    return (begun[..., :, None] == begun[..., None, :]) & (token >= other)
