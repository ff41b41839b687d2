"""Flash attention (Dao et al. 2022) in plain XLA: one block of queries at a time against the keys it can see.

Blocks that causality or the window hide are never computed, forward or backward. The backward pass recomputes the
weights from the saved log-sum-exp, so memory is O(sequence * block).
"""

from collections.abc import Callable, Iterator
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.flash_attention.mask import Mask

# Queries a block. Small enough that no block is (sequence, sequence), few enough that the program stays short.
SMALLEST_BLOCK, MOST_BLOCKS = 256, 16


def flash_attention(
    q: Float[Array, "b s h d"],
    k: Float[Array, "b s n d"],
    v: Float[Array, "b s n d"],
    key_start: Int[Array, "b s"],
    mask: Mask = Mask(),
    scale: float | None = None,
) -> Float[Array, "b s h d"]:
    """Causal softmax attention over packed rows.

    h is a multiple of n: consecutive groups of query heads share a key head. A query at index i sees the keys
    key_start[i] <= j <= i (and j > i - window). Products in the inputs' dtype, accumulated in float32.
    """
    heads, kv_heads = q.shape[2], k.shape[2]
    if heads % kv_heads:
        raise ValueError(f"flash_attention: {heads} query heads are not a multiple of {kv_heads} key heads")
    if q.size >= 2**31:
        raise ValueError(f"flash_attention: {q.size} elements; fewer than 2^31 are supported")
    return _attention(q, k, v, key_start, mask, q.shape[-1] ** -0.5 if scale is None else scale)


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _attention(q, k, v, key_start, mask, scale):
    return _forward(q, k, v, key_start, mask, scale)[0]


def _forward(q, k, v, key_start, mask, scale):
    out, lse = _over_heads(
        partial(_forward_head, mask=mask, scale=scale), (_by_head(q, k), _by_head(k, k), _by_head(v, k)), key_start
    )
    out = _by_token(out)
    return out, (q, k, v, key_start, out, lse)


def _backward(mask, scale, residuals, d_out):
    q, k, v, key_start, out, lse = residuals
    delta = jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), axis=-1, keepdims=True)
    delta = _by_head(delta, k)[..., 0]
    by_head = (_by_head(q, k), _by_head(k, k), _by_head(v, k), _by_head(d_out, k), lse, delta)
    dq, dk, dv = _over_heads(partial(_backward_head, mask=mask, scale=scale), by_head, key_start)
    return _by_token(dq), _by_token(dk), _by_token(dv), None


_attention.defvjp(_forward, _backward)


def _by_head(x: Array, k: Array) -> Array:
    """(b, s, h, d) to (b, n, g, s, d): queries grouped by the key head they share."""
    batch, sequence, heads, dim = x.shape
    return x.reshape(batch, sequence, k.shape[2], heads // k.shape[2], dim).transpose(0, 2, 3, 1, 4)


def _by_token(x: Array) -> Array:
    batch, kv_heads, group, sequence, dim = x.shape
    return x.transpose(0, 3, 1, 2, 4).reshape(batch, sequence, kv_heads * group, dim)


def _over_heads(head: Callable, arrays: tuple[Array, ...], key_start: Array):
    """`head` for every row and key head: a loop on a CPU, whose matrix products want two dimensions, else at once."""

    def loop(arrays, key_start):
        return jax.lax.map(lambda row: jax.lax.map(lambda one: head(*one, row[1]), row[0]), (arrays, key_start))

    def batched(arrays, key_start):
        return jax.vmap(lambda row, start: jax.vmap(lambda *one: head(*one, start))(*row))(arrays, key_start)

    return jax.lax.platform_dependent(arrays, key_start, cpu=loop, default=batched)


def _blocks(sequence: int, mask: Mask) -> Iterator[tuple[slice, slice]]:
    """Blocks of queries, each with the keys that any of them can see."""
    size = max(SMALLEST_BLOCK, -(-sequence // MOST_BLOCKS))
    for start in range(0, sequence, size):
        end = min(start + size, sequence)
        yield slice(start, end), slice(mask.first_key(start), end)


def _logits(q, k, key_start, queries: slice, keys: slice, mask: Mask, scale: float):
    """Masked logits of one block, (g * queries, keys) in float32: two-dimensional products are the fast ones."""
    rows = q[:, queries].reshape(-1, q.shape[-1])
    logits = jax.lax.dot_general(rows, k[keys], (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32) * scale
    query = jnp.arange(queries.start, queries.stop)[:, None]
    key = jnp.arange(keys.start, keys.stop)[None, :]
    seen = (key <= query) & (key >= key_start[queries, None])
    if mask.window is not None:
        seen &= key > query - mask.window
    return rows, jnp.where(jnp.tile(seen, (q.shape[0], 1)), logits, -jnp.inf)


def _forward_head(q, k, v, key_start, *, mask, scale):
    """q (g, s, d), k and v (1, s, d): output (g, s, d) and log-sum-exp (g, s)."""
    group, k, v = q.shape[0], k[0], v[0]
    outs, lses = [], []
    for queries, keys in _blocks(q.shape[1], mask):
        _, logits = _logits(q, k, key_start, queries, keys, mask, scale)
        top = jnp.max(logits, axis=-1, keepdims=True)
        weights = jnp.exp(logits - top)
        total = jnp.sum(weights, axis=-1, keepdims=True)
        out = jnp.dot(weights.astype(v.dtype), v[keys], preferred_element_type=jnp.float32) / total
        outs.append(out.astype(q.dtype).reshape(group, -1, q.shape[-1]))
        lses.append((top + jnp.log(total)).reshape(group, -1))
    return jnp.concatenate(outs, axis=1), jnp.concatenate(lses, axis=1)


def _backward_head(q, k, v, d_out, lse, delta, key_start, *, mask, scale):
    """Gradients of q (g, s, d), k and v (1, s, d); those of k and v are summed over the group here."""
    group, k, v = q.shape[0], k[0], v[0]
    dqs = []
    dk, dv = jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
    for queries, keys in _blocks(q.shape[1], mask):
        rows, logits = _logits(q, k, key_start, queries, keys, mask, scale)
        d_rows = d_out[:, queries].reshape(-1, v.shape[-1])
        weights = jnp.exp(logits - lse[:, queries].reshape(-1, 1))
        d_weights = jax.lax.dot_general(d_rows, v[keys], (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
        d_logits = (weights * (d_weights - delta[:, queries].reshape(-1, 1)) * scale).astype(q.dtype)
        dqs.append(
            jnp.dot(d_logits, k[keys], preferred_element_type=jnp.float32)
            .astype(q.dtype)
            .reshape(group, -1, q.shape[-1])
        )
        contract_rows = (((0,), (0,)), ((), ()))
        dk = dk.at[keys].add(jax.lax.dot_general(d_logits, rows, contract_rows, preferred_element_type=jnp.float32))
        dv = dv.at[keys].add(
            jax.lax.dot_general(weights.astype(v.dtype), d_rows, contract_rows, preferred_element_type=jnp.float32)
        )
    return jnp.concatenate(dqs, axis=1), dk[None].astype(k.dtype), dv[None].astype(v.dtype)
