"""Dense attention in plain jnp: what every backend is compared with, and what decodes single tokens."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.flash_attention.variant import Variant


def visible(first: Int[Array, "b s"], end: Int[Array, "b s"], keys: int) -> Bool[Array, "b s t"]:
    """True where a query sees a key, of the intervals of `mask.intervals`."""
    key = jnp.arange(keys)
    return (key >= first[..., None]) & (key < end[..., None])


def attention(
    q: Float[Array, "b s h d"],
    k: Float[Array, "b t n d"],
    v: Float[Array, "b t n d"],
    first: Int[Array, "b s"],
    end: Int[Array, "b s"],
    sinks: Float[Array, " h"] | None,
    variant: Variant,
    accumulation: DTypeLike = jnp.float32,
) -> tuple[Float[Array, "b s h d"], Float[Array, "b h s"]]:
    """Softmax attention and the log-sum-exp of its logits (natural, the sink included), made with all logits at once.

    Query i sees the keys first_i <= j < end_i; h is a multiple of n, consecutive query heads share a key head. Products
    take the inputs in their dtype; they, the softmax and the log-sum-exp are accumulated in `accumulation`. The output
    has the dtype of q. jax differentiates it as it stands, queries that see no key included.
    """
    batch, queries, heads, dim = q.shape
    seen = visible(first, end, k.shape[1])
    sees = jnp.any(seen, axis=2)
    # 0 * NaN is NaN: queries and keys without a part in it must be zeros, forward and (the last lines) backward.
    q = jnp.where(sees[..., None, None], q, 0)
    k, v = (jnp.where(jnp.any(seen, axis=1)[..., None, None], x, 0) for x in (k, v))

    grouped = q.reshape(batch, queries, k.shape[2], heads // k.shape[2], dim)
    logits = jnp.einsum("bsngd,btnd->bngst", grouped, k, preferred_element_type=accumulation) * variant.scale
    if variant.soft_cap is not None:
        logits = variant.soft_cap * jnp.tanh(logits / variant.soft_cap)
    seen = seen[:, None, None]
    top = jnp.max(jnp.where(seen, logits, -jnp.inf), axis=-1, keepdims=True)
    if sinks is not None:
        sinks = sinks.astype(accumulation).reshape(k.shape[2], -1, 1, 1)
        top = jnp.maximum(top, sinks)
    # The shift cancels, so it needs no gradient; where all logits are -inf it must be finite.
    top = jax.lax.stop_gradient(jnp.where(top == -jnp.inf, 0, top))
    weights = jnp.where(seen, jnp.exp(jnp.where(seen, logits - top, 0)), 0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    if sinks is not None:
        total += jnp.exp(sinks - top)
    something = total > 0
    total = jnp.where(something, total, 1)
    lse = jnp.where(something, top + jnp.log(total), -jnp.inf)

    out = jnp.einsum("bngst,btnd->bsngd", (weights / total).astype(v.dtype), v, preferred_element_type=accumulation)
    out, lse = out.reshape(q.shape), lse.reshape(batch, heads, queries)
    out = jnp.where(sees[..., None, None], out, 0)
    lse = jnp.where(sees[:, None], lse, jax.lax.stop_gradient(lse))
    return out.astype(q.dtype), lse
