"""Cut a sequence into chunks, and compute the decays between the tokens of a chunk. Kernels use these functions too.

Shapes: *b leading axes, c tokens of a chunk.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

# As in flash-linear-attention. Longer chunks mean fewer sequential steps, but more work per token inside a chunk.
CHUNK = 64


def whole_chunks(x: Array, axis: int) -> Array:
    """Pad an axis with zeros to whole chunks; padded tokens do not change the state."""
    width = [(0, 0)] * x.ndim
    width[axis] = (0, -x.shape[axis] % CHUNK)
    return jnp.pad(x, width)


def sum_decays(
    log_decay: Float[Array, "*b c"], starts: Bool[Array, "*b c"]
) -> tuple[Float[Array, "*b c"], Int[Array, "*b c"]]:
    """Return for each token the summed log_decay since its document or the chunk began, and the documents begun so far.

    The second result counts documents that start in the chunk up to the token. A token that starts a document does not
    decay. A sum includes only tokens of its own document, so that other documents do not add rounding errors.
    """
    documents = jnp.cumsum(starts, axis=-1, dtype=jnp.int32)
    # The state that a start would decay is zero. With a constant in its place, the start's log_decay gets no gradient.
    log_decay = jnp.where(starts, 0, log_decay)
    return jnp.sum(jnp.where(_visible_pairs(documents), log_decay[..., None, :], 0), axis=-1), documents


def decays(
    total: Float[Array, "*b c"], documents: Int[Array, "*b c"]
) -> tuple[Float[Array, "*b c c"], Float[Array, "*b c"]]:
    """Compute decay factors from the results of `sum_decays`: between tokens, and from the chunk's start to a token.

    The first result, at [token, other], multiplies what the other token wrote; the second multiplies the state before
    the chunk. Both are exactly 0 for a later token or another document.
    """
    # Masked before the exponential, because for a later token it may be infinite and its gradient NaN.
    between = jnp.exp(jnp.where(_visible_pairs(documents), total[..., :, None] - total[..., None, :], -jnp.inf))
    # Only tokens of the document that continues from before the chunk (number 0) read the state before the chunk.
    return between, jnp.exp(jnp.where(documents == 0, total, -jnp.inf))


def _visible_pairs(documents: Int[Array, "*b c"]) -> Bool[Array, "*b c c"]:
    token, other = (jax.lax.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), axis) for axis in (0, 1))
    return (documents[..., :, None] == documents[..., None, :]) & (token >= other)
