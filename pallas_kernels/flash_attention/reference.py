"""Dense attention in plain jnp: the reference of every backend, also used to decode single tokens."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.flash_attention.variant import Variant


def visible(first: Int[Array, "b s"], end: Int[Array, "b s"], keys: int) -> Bool[Array, "b s t"]:
    """Return True where a query sees a key, given the results of `mask.intervals`."""
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
    """Compute softmax attention and the natural log-sum-exp of its logits, sink included, from all logits at once.

    Query i sees the keys first_i <= j < end_i; h is a multiple of n, and consecutive query heads share a key head.
    Products take the inputs in their dtype; products, softmax and log-sum-exp are accumulated in `accumulation`. The
    output has the dtype of q. jax differentiates this function directly, also for queries that see no key.
    """
    batch, queries, heads, dim = q.shape
    seen = visible(first, end, k.shape[1])
    sees = jnp.any(seen, axis=2)
    # 0 * NaN is NaN: queries that see no key and keys that no query sees must be zeros, in the forward pass and (the
    # last lines) in the backward pass.
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
    # The shift by the maximum cancels, so it needs no gradient; it must be finite even if all logits are -inf.
    top = jax.lax.stop_gradient(jnp.where(top == -jnp.inf, 0, top))
    weights = jnp.where(seen, jnp.exp(jnp.where(seen, logits - top, 0)), 0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    if sinks is not None:
        total += jnp.exp(sinks - top)
    nonzero = total > 0
    total = jnp.where(nonzero, total, 1)
    lse = jnp.where(nonzero, top + jnp.log(total), -jnp.inf)

    out = jnp.einsum("bngst,btnd->bsngd", (weights / total).astype(v.dtype), v, preferred_element_type=accumulation)
    out, lse = out.reshape(q.shape), lse.reshape(batch, heads, queries)
    out = jnp.where(sees[..., None, None], out, 0)
    lse = jnp.where(sees[:, None], lse, jax.lax.stop_gradient(lse))
    return out.astype(q.dtype), lse
