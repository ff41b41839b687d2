"""Dense attention in plain jnp: what every backend is compared with, and what decodes single tokens."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.flash_attention.mask import Mask


def visible(
    query_index: Int[Array, "b s"], key_index: Int[Array, " t"], key_start: Int[Array, "b s"], mask: Mask
) -> Bool[Array, "b s t"]:
    """True where a query may look at a key."""
    query, key, start = query_index[:, :, None], key_index[None, None, :], key_start[:, :, None]
    seen = (key <= query) & (key >= start)
    return seen if mask.window is None else seen & (key > query - mask.window)


def dense_attention(
    q: Float[Array, "b s h d"],
    k: Float[Array, "b t n d"],
    v: Float[Array, "b t n d"],
    seen: Bool[Array, "b s t"],
    scale: float,
) -> Float[Array, "b s h d"]:
    """Softmax attention in float32, h a multiple of n (grouped queries); every query must see a key."""
    batch, queries, heads, dim = q.shape
    grouped = q.reshape(batch, queries, k.shape[2], heads // k.shape[2], dim)
    logits = jnp.einsum("bsngd,btnd->bngst", grouped, k, preferred_element_type=jnp.float32) * scale
    weights = jax.nn.softmax(jnp.where(seen[:, None, None], logits, -jnp.inf), axis=-1)
    out = jnp.einsum("bngst,btnd->bsngd", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
    return out.reshape(batch, queries, heads, dim).astype(q.dtype)
