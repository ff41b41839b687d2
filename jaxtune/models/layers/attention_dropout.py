"""Attention with dropout of probabilities in plain XLA, because no kernel has it.

Each block of queries attends to all keys of a row, and is recomputed in the backward pass.

Shape letters: b rows of the batch, s queries of a row, t keys of a row, h query heads, n key heads, d features of a
head, q queries of a block.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxtune.models.structure.mixers import Heads
from jaxtune.parallel.layout import P
from jaxtune.parallel.random import Noise
from pallas_kernels.flash_attention import MaskSpec
from pallas_kernels.flash_attention.mask import intervals

BLOCK = 128  # queries of a block, at most
LOWEST = float(jnp.finfo(jnp.float32).min)


class Bits(NamedTuple):
    """The source of the random bits of probabilities, which depend only on row, head, query and key."""

    key: Array
    rows: Int[Array, " b"]
    heads: Int[Array, " h"]
    rate: Float[Array, ""]


def bits_of(noise: Noise, rate: float, q: Float[Array, "b s h d"]) -> Bits:
    """Return the source of bits of a layer, sharded like the queries in its kernel."""
    rows, _, heads, _ = jax.typeof(q).sharding.spec
    numbers = jax.reshard(jnp.arange(q.shape[2]), P(heads))
    return Bits(noise.site("attention").key, jax.reshard(noise.rows, P(rows)), numbers, jnp.asarray(noise.rate(rate)))


def attend_dropping(
    q: Float[Array, "b s h d"],
    k: Float[Array, "b t n d"],
    v: Float[Array, "b t n d"],
    mask: MaskSpec,
    mixer: Heads,
    sinks: Float[Array, " h"] | None,
    bits: Bits,
    index: Int[Array, "b s"],
) -> Float[Array, "b s h d"]:
    """Attend as `flash_attention`, but set each probability to zero with probability `bits.rate` and scale up the rest.

    On one device. index: the position of each query in its row.
    """
    batch, length, heads, dim = q.shape
    scale = dim**-0.5 if mixer.scale is None else mixer.scale
    first, end = intervals(mask, batch, length, k.shape[1])
    # The largest block that divides the length, so that a scan over blocks needs no padding.
    size = next(size for size in range(min(BLOCK, length), 0, -1) if length % size == 0)
    k, v = (jnp.repeat(x, heads // k.shape[2], axis=2) for x in (k, v))  # (b, t, n, d) -> (b, t, h, d)
    keys = jnp.arange(k.shape[1])

    def draw(row: Array, head: Array, query: Array) -> Array:
        key = jax.random.fold_in(jax.random.fold_in(jax.random.fold_in(bits.key, row), head), query)
        return jax.random.bernoulli(key, 1.0 - bits.rate, keys.shape)

    of_head = jax.vmap(draw, (None, None, 0))
    of_rows = jax.vmap(jax.vmap(of_head, (None, 0, None)), (0, None, 0))  # (b, h, queries of a block, t)

    @jax.checkpoint
    def attend(_: None, block: tuple[Array, ...]) -> tuple[None, Array]:
        q, first, end, index = block
        logits = jnp.einsum("bqhd,bthd->bhqt", q, k, preferred_element_type=jnp.float32) * scale
        if mixer.soft_cap is not None:
            logits = mixer.soft_cap * jnp.tanh(logits / mixer.soft_cap)
        seen = ((keys >= first[..., None]) & (keys < end[..., None]))[:, None]  # (b, 1, q, t)
        logits = jnp.where(seen, logits, -jnp.inf)
        # Softmax by hand, because a sink adds to the denominator without a value, and dropout comes after it.
        top = jnp.max(logits, axis=-1, keepdims=True, initial=LOWEST)  # finite even if a query sees no key
        sink = None if sinks is None else sinks.astype(jnp.float32)[:, None, None]
        # Softmax does not depend on this shift, so it needs no gradient.
        top = jax.lax.stop_gradient(top if sink is None else jnp.maximum(top, sink))
        weights = jnp.exp(logits - top)
        total = jnp.sum(weights, axis=-1, keepdims=True) + (0 if sink is None else jnp.exp(sink - top))
        # One division normalises and scales up what dropout leaves.
        kept_share = jnp.where(total > 0, total, 1) * (1 - bits.rate)
        weights = jnp.where(of_rows(bits.rows, bits.heads, index), weights / kept_share, 0)
        return None, jnp.einsum("bhqt,bthd->bqhd", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)

    def in_blocks(x: Array) -> Array:
        # (b, s, ...) -> (blocks, b, q, ...): blocks are scanned.
        return jnp.moveaxis(x.reshape(batch, length // size, size, *x.shape[2:]), 1, 0)

    _, out = jax.lax.scan(attend, None, tuple(map(in_blocks, (q, first, end, index))))
    return jnp.moveaxis(out, 0, 1).reshape(q.shape).astype(q.dtype)
