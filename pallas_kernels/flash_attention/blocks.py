"""Which blocks of keys a block of queries sees, and the reverse: kernels loop over these, and never load the others.

A range is [begin, full_begin, full_end, stop): outside [begin, stop) nothing is visible, within [full_begin, full_end)
everything is, and the blocks between need the mask of each element.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from pallas_kernels.flash_attention.variant import Variant


class _Extremes(NamedTuple):
    """Over the queries of each block, (b, query blocks): the least and greatest first key and end of keys."""

    least_first: Int[Array, "b x"]
    most_first: Int[Array, "b x"]
    least_end: Int[Array, "b x"]
    most_end: Int[Array, "b x"]


def key_blocks(
    first: Int[Array, "b s"], end: Int[Array, "b s"], keys: int, block_q: int, block_k: int
) -> Int[Array, "b x 4"]:
    """For each block of queries, its range in blocks of keys."""
    seen = _extremes(first, end, block_q, keys)
    begin, stop = seen.least_first // block_k, -(-seen.most_end // block_k)
    begin = jnp.minimum(begin, stop)
    full_begin = jnp.clip(-(-seen.most_first // block_k), begin, stop)
    full_end = jnp.clip(seen.least_end // block_k, full_begin, stop)
    return jnp.stack([begin, full_begin, full_end, stop], axis=-1)


def query_blocks(
    first: Int[Array, "b s"], end: Int[Array, "b s"], keys: int, block_q: int, block_k: int
) -> Int[Array, "b y 4"]:
    """For each block of keys, its range in blocks of queries."""
    seen = _Extremes(*(extreme[:, None, :] for extreme in _extremes(first, end, block_q, keys)))
    start = jnp.arange(0, keys, block_k, dtype=jnp.int32)[None, :, None]
    touched = (seen.least_first < start + block_k) & (seen.most_end > start)
    full = (seen.most_first <= start) & (seen.least_end >= start + block_k)
    # Blocks between the first and the last that touch these keys may see none of them: the mask hides their elements.
    # Of the blocks that see them all only the first unbroken run counts as full.
    begin, stop = _first_true(touched), _end_of_true(touched)
    begin = jnp.minimum(begin, stop)
    full_begin = jnp.clip(_first_true(full), begin, stop)
    block = jnp.arange(full.shape[-1])
    full_end = jnp.clip(_first_true(~full & (block >= full_begin[..., None])), full_begin, stop)
    return jnp.stack([begin, full_begin, full_end, stop], axis=-1)


def most_flops(variant: Variant, q: Array, k: Array, block_q: int, block_k: int, products: int) -> float:
    """Of matrix products over the blocks of logits that q (b, s, h, d) and k may need.

    These are all blocks that causality and the window leave, as if each row were one document; where offsets are known
    at run time only, as if the blocks of queries were spread evenly over the keys, as chunks dealt to devices are.
    """
    (batch, queries, heads, head_dim), keys = q.shape, k.shape[1]
    blocks = 0
    for start in range(0, queries, block_q):
        start = start * keys // queries if variant.query_offset is None else start + variant.query_offset
        stop = min(keys, start + block_q) if variant.causal else keys
        begin = max(0, start - variant.window + 1) if variant.window else 0
        blocks += max(0, -(-stop // block_k) - begin // block_k)
    return 2.0 * products * blocks * block_q * block_k * head_dim * heads * batch


def seen_keys(first: Int[Array, "b s"], end: Int[Array, "b s"], keys: int) -> Bool[Array, "b t"]:
    """Keys that some query sees. Others may hold anything, and zero times NaN is NaN: kernels set them to zero."""
    row = jnp.arange(first.shape[0])[:, None]
    change = jnp.zeros((first.shape[0], keys + 1), jnp.int32).at[row, first].add(1).at[row, end].add(-1)
    return jnp.cumsum(change, axis=1)[:, :-1] > 0


def whole_blocks(x: Array, block: int, axis: int = 1) -> Array:
    """Zeros after the last element of an axis up to a whole block; for bounds, queries that see nothing."""
    padding = -x.shape[axis] % block
    return jnp.pad(x, [(0, padding if place == axis else 0) for place in range(x.ndim)]) if padding else x


def _extremes(first: Int[Array, "b s"], end: Int[Array, "b s"], block: int, keys: int) -> _Extremes:
    """Queries that see no key, and padding of the last block, widen no range but keep a block from being full."""
    padding = ((0, 0), (0, -first.shape[1] % block))
    first, end = (jnp.pad(bound, padding).reshape(first.shape[0], -1, block) for bound in (first, end))
    sees = first < end
    return _Extremes(
        least_first=jnp.min(jnp.where(sees, first, keys), axis=-1),
        most_first=jnp.max(jnp.where(sees, first, keys), axis=-1),
        least_end=jnp.min(end, axis=-1),
        most_end=jnp.max(end, axis=-1),
    )


def _first_true(flags: Bool[Array, "b y x"]) -> Int[Array, "b y"]:
    """Index of the first True, or the length without one."""
    return jnp.where(jnp.any(flags, axis=-1), jnp.argmax(flags, axis=-1), flags.shape[-1]).astype(jnp.int32)


def _end_of_true(flags: Bool[Array, "b y x"]) -> Int[Array, "b y"]:
    """One past the index of the last True, or 0 without one."""
    return jnp.max(jnp.where(flags, jnp.arange(1, flags.shape[-1] + 1), 0), axis=-1).astype(jnp.int32)
