"""Flash attention (Dao et al. 2022) in plain XLA: one block of queries at a time against the keys it can see.

Keys that causality or the window hide from a block are skipped at trace time, forward and backward. The backward pass
recomputes the weights from the saved log-sum-exp, so memory is O(keys * block).

Shapes: b batch, s queries, t keys, h query heads, n key heads, g query heads per key head, d head dimension, r rows of
a block (g * size).
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.flash_attention.blocks import seen_keys
from pallas_kernels.flash_attention.variant import Variant

# Queries per block, and the largest number of strips of blocks, each with its own range of keys, that are unrolled.
BLOCK, MOST_STRIPS = 256, 16
LOWEST = float(jnp.finfo(jnp.float32).min)


def forward(
    q: Float[Array, "b s h d"],
    k: Float[Array, "b t n d"],
    v: Float[Array, "b t n d"],
    first: Int[Array, "b s"],
    end: Int[Array, "b s"],
    sinks: Float[Array, " h"] | None,
    variant: Variant,
    *,
    block: int = BLOCK,
) -> tuple[Float[Array, "b s h d"], Float[Array, "b h s"]]:
    """Return the output in the dtype of q, and the natural float32 log-sum-exp of the logits, sink included.

    Query i sees the keys first_i <= j < end_i. Products are in the inputs' dtype, accumulated in float32. `block`
    queries are computed at a time.
    """
    batch, queries, heads, _ = q.shape
    seen = seen_keys(first, end, k.shape[1])[..., None, None]
    k, v = jnp.where(seen, k, 0), jnp.where(seen, v, 0)
    if sinks is not None:
        sinks = sinks.astype(jnp.float32).reshape(k.shape[2], -1)
        sinks = jnp.broadcast_to(sinks, (batch, *sinks.shape))
    by_head = (_by_head(q, k), _by_head(k, k), _by_head(v, k), sinks)
    out, lse = _over_heads(partial(_forward_head, block=block, variant=variant), by_head, (first, end))
    return _by_token(out), lse.reshape(batch, heads, queries)


def backward(
    q: Float[Array, "b s h d"],
    k: Float[Array, "b t n d"],
    v: Float[Array, "b t n d"],
    first: Int[Array, "b s"],
    end: Int[Array, "b s"],
    lse: Float[Array, "b h s"],
    delta: Float[Array, "b h s"],
    d_out: Float[Array, "b s h d"],
    variant: Variant,
    *,
    block: int = BLOCK,
) -> tuple[Float[Array, "b s h d"], Float[Array, "b t n d"], Float[Array, "b t n d"]]:
    """Return gradients of q, k and v in their dtypes; `delta` is sum(d_out * out) minus the log-sum-exp's cotangent."""
    batch, queries, heads, _ = q.shape
    seen = seen_keys(first, end, k.shape[1])[..., None, None]
    k, v = jnp.where(seen, k, 0), jnp.where(seen, v, 0)
    # A query that sees no key has weights of zero, even if it or its cotangents are NaN.
    sees = first < end
    q, d_out = (jnp.where(sees[..., None, None], x, 0) for x in (q, d_out))
    lse = jnp.where(sees[:, None], lse, jnp.inf)

    lse, delta = (x.reshape(batch, k.shape[2], heads // k.shape[2], queries) for x in (lse, delta))
    by_head = (_by_head(q, k), _by_head(k, k), _by_head(v, k), _by_head(d_out, k), lse, delta)
    dq, dk, dv = _over_heads(partial(_backward_head, block=block, variant=variant), by_head, (first, end))
    return _by_token(dq), _by_token(dk), _by_token(dv)


def _by_head(x: Array, k: Array) -> Array:
    """Transpose (b, s, h, d) to (b, n, g, s, d): query heads grouped by the key head that they share."""
    batch, sequence, heads, dim = x.shape
    return x.reshape(batch, sequence, k.shape[2], heads // k.shape[2], dim).transpose(0, 2, 3, 1, 4)


def _by_token(x: Array) -> Array:
    batch, kv_heads, group, sequence, dim = x.shape
    return x.transpose(0, 3, 1, 2, 4).reshape(batch, sequence, kv_heads * group, dim)


def _over_heads(head: Callable, by_head: tuple[Array | None, ...], by_row: tuple[Array, ...]):
    """Apply `head` to every row and key head: in a loop on a CPU, where 2-D products are fast, elsewhere batched."""

    def loop(by_head, by_row):
        return jax.lax.map(lambda row: jax.lax.map(lambda one: head(*one, *row[1]), row[0]), (by_head, by_row))

    def batched(by_head, by_row):
        return jax.vmap(lambda heads, row: jax.vmap(lambda *one: head(*one, *row))(*heads))(by_head, by_row)

    return jax.lax.platform_dependent(by_head, by_row, cpu=loop, default=batched)


def _strips(queries: int, keys: int, block: int, variant: Variant) -> Iterator[tuple[slice, int, slice]]:
    """Yield strips of queries, the size of their blocks (a divisor), and the keys that any query of a strip can see."""
    offset = variant.query_offset if variant.causal or variant.window is not None else None
    # Without causality, a window or a static offset every strip would have the same keys, so there is only one.
    full_blocks = queries // block
    blocks_per_strip = full_blocks if offset is None else -(-full_blocks // MOST_STRIPS)
    starts = [*range(0, full_blocks, max(blocks_per_strip, 1)), full_blocks]
    strips = [(start * block, stop * block, block) for start, stop in pairwise(starts)]
    if queries % block:
        strips.append((full_blocks * block, queries, queries % block))
    for start, stop, size in strips:
        begin, limit = 0, keys
        if offset is not None:
            if variant.causal:
                limit = min(max(stop + offset, 0), keys)
            if variant.window is not None:
                begin = min(max(start + offset - variant.window + 1, 0), limit)
        yield slice(start, stop), size, slice(begin, limit)


def _block(start: Array, size: int, *arrays: Array) -> tuple[Array, ...]:
    """Slice `size` queries from `start` on from arrays (g, s, ...), as (g * size, ...): 2-D products are fast."""
    blocks = (jax.lax.dynamic_slice_in_dim(x, start, size, axis=1) for x in arrays)
    return tuple(x.reshape(-1, *x.shape[2:]) for x in blocks)


def _logits(
    q: Float[Array, "r d"],
    k: Float[Array, "t d"],
    first: Int[Array, " r"],
    end: Int[Array, " r"],
    begin: int,
    variant: Variant,
) -> tuple[Float[Array, "r t"], Bool[Array, "r t"]]:
    """Return logits in float32, and which of the keys each query sees; the first key in k has index `begin`."""
    logits = jax.lax.dot_general(q, k, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32) * variant.scale
    if variant.soft_cap is not None:
        logits = variant.soft_cap * jnp.tanh(logits / variant.soft_cap)
    key = jnp.arange(begin, begin + k.shape[0])
    return logits, (key >= first[:, None]) & (key < end[:, None])


def _forward_head(q, k, v, sinks, first, end, *, block, variant):
    """Return output (g, s, d) and log-sum-exp (g, s) for q (g, s, d), k and v (1, t, d) and sinks (g,)."""
    group, k, v = q.shape[0], k[0], v[0]
    first, end = jnp.broadcast_to(first, q.shape[:2]), jnp.broadcast_to(end, q.shape[:2])

    def attend(size: int, keys: slice, nothing: None, start: Array):
        rows, row_first, row_end = _block(start, size, q, first, end)
        logits, seen = _logits(rows, k[keys], row_first, row_end, keys.start, variant)
        logits = jnp.where(seen, logits, -jnp.inf)
        top = jnp.max(logits, axis=-1, keepdims=True, initial=LOWEST)  # finite even if a query sees no key
        sink = None if sinks is None else jnp.repeat(sinks, size)[:, None]
        if sink is not None:
            top = jnp.maximum(top, sink)
        weights = jnp.exp(logits - top)
        total = jnp.sum(weights, axis=-1, keepdims=True)
        if sink is not None:
            total += jnp.exp(sink - top)
        out = jnp.dot(weights.astype(v.dtype), v[keys], preferred_element_type=jnp.float32)
        out = (out / jnp.where(total > 0, total, 1)).astype(q.dtype)
        return nothing, (out.reshape(group, size, -1), (top + jnp.log(total)).reshape(group, size))

    strips = _strips(q.shape[1], k.shape[0], block, variant)
    results = [_scan(partial(attend, size, keys), None, queries, size)[1] for queries, size, keys in strips]
    outs, lses = zip(*results)
    return jnp.concatenate(outs, axis=1), jnp.concatenate(lses, axis=1)


def _backward_head(q, k, v, d_out, lse, delta, first, end, *, block, variant):
    """Return gradients of q (g, s, d), and of k and v (1, t, d), which are summed over the group here."""
    group, k, v = q.shape[0], k[0], v[0]
    first, end = jnp.broadcast_to(first, q.shape[:2]), jnp.broadcast_to(end, q.shape[:2])
    over_rows, over_dim = (((0,), (0,)), ((), ())), (((1,), (1,)), ((), ()))
    product = partial(jax.lax.dot_general, preferred_element_type=jnp.float32)

    def differentiate(size: int, keys: slice, carry: tuple[Array, Array], start: Array):
        dk, dv = carry
        rows, d_rows, *row_values = _block(start, size, q, d_out, lse, delta, first, end)
        row_lse, row_delta, row_first, row_end = row_values
        logits, seen = _logits(rows, k[keys], row_first, row_end, keys.start, variant)
        weights = jnp.exp(jnp.where(seen, logits, -jnp.inf) - row_lse[:, None])
        d_logits = weights * (product(d_rows, v[keys], over_dim) - row_delta[:, None]) * variant.scale
        if variant.soft_cap is not None:
            d_logits *= 1 - jnp.square(logits / variant.soft_cap)
        weights, d_logits = weights.astype(v.dtype), d_logits.astype(q.dtype)
        dk = dk.at[keys].add(product(d_logits, rows, over_rows))
        dv = dv.at[keys].add(product(weights, d_rows, over_rows))
        dq = jnp.dot(d_logits, k[keys], preferred_element_type=jnp.float32).astype(q.dtype)
        return (dk, dv), dq.reshape(group, size, -1)

    dqs = []
    sums = jnp.zeros_like(k, jnp.float32), jnp.zeros_like(v, jnp.float32)
    for queries, size, keys in _strips(q.shape[1], k.shape[0], block, variant):
        sums, dq = _scan(partial(differentiate, size, keys), sums, queries, size)
        dqs.append(dq)
    dk, dv = sums
    return jnp.concatenate(dqs, axis=1), dk[None].astype(k.dtype), dv[None].astype(v.dtype)


def _scan(run_block: Callable, carry, queries: slice, size: int):
    """Run `run_block` on every block of a strip and join its results (g, size, ...) to (g, queries, ...)."""
    # A strip of one block is unrolled, because it needs no loop.
    starts = jnp.arange(queries.start, queries.stop, size)
    carry, blocks = jax.lax.scan(run_block, carry, starts, unroll=len(starts) == 1)
    return carry, jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:]), blocks)
