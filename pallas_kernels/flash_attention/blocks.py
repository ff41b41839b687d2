"""The blocks of keys that a block of queries sees, and the reverse. Kernels loop over them and never load other blocks.

A range is [begin, full_begin, full_end, stop]: outside [begin, stop) no element is visible, within
[full_begin, full_end) every element is, and the other blocks of [begin, stop) need the mask of each element.

Shapes: b batch, s queries, t keys, h heads, d head dimension, x blocks of queries, y blocks of keys.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from pallas_kernels.flash_attention.variant import Variant


class _Extremes(NamedTuple):
    """The smallest and largest first key, and end of keys, over the queries of each block."""

    least_first: Int[Array, "b x"]
    most_first: Int[Array, "b x"]
    least_end: Int[Array, "b x"]
    most_end: Int[Array, "b x"]


def key_blocks(
    first: Int[Array, "b s"], end: Int[Array, "b s"], keys: int, block_q: int, block_k: int
) -> Int[Array, "b x 4"]:
    """Return for each block of queries its range of blocks of keys."""
    extremes = _extremes(first, end, block_q, keys)
    begin, stop = extremes.least_first // block_k, -(-extremes.most_end // block_k)
    begin = jnp.minimum(begin, stop)
    full_begin = jnp.clip(-(-extremes.most_first // block_k), begin, stop)
    full_end = jnp.clip(extremes.least_end // block_k, full_begin, stop)
    return jnp.stack([begin, full_begin, full_end, stop], axis=-1)


def query_blocks(
    first: Int[Array, "b s"], end: Int[Array, "b s"], keys: int, block_q: int, block_k: int
) -> Int[Array, "b y 4"]:
    """Return for each block of keys its range of blocks of queries."""
    extremes = _Extremes(*(extreme[:, None, :] for extreme in _extremes(first, end, block_q, keys)))
    start = jnp.arange(0, keys, block_k, dtype=jnp.int32)[None, :, None]
    touched = (extremes.least_first < start + block_k) & (extremes.most_end > start)
    full = (extremes.most_first <= start) & (extremes.least_end >= start + block_k)
    # A block between the first and the last block that touch these keys may see none of the keys: the mask then hides
    # its elements. If blocks that see all of the keys are not contiguous, only the first run of blocks counts as full.
    begin, stop = _first_true(touched), _end_of_true(touched)
    begin = jnp.minimum(begin, stop)
    full_begin = jnp.clip(_first_true(full), begin, stop)
    block = jnp.arange(full.shape[-1])
    full_end = jnp.clip(_first_true(~full & (block >= full_begin[..., None])), full_begin, stop)
    return jnp.stack([begin, full_begin, full_end, stop], axis=-1)


def most_flops(variant: Variant, q: Array, k: Array, block_q: int, block_k: int, products: int) -> float:
    """Return an upper bound of the flops of `products` matrix products over the blocks of logits of q and k.

    It counts all blocks that causality and the window leave, as if each row were one document. If offsets are known
    only at run time, it assumes that the blocks of queries are spread evenly over the keys, like the chunks of a
    sequence that is sharded over devices.
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
    """Return which keys some query sees.

    Other keys may hold NaN, and zero times NaN is NaN, so kernels set them to zero.
    """
    # +1 where an interval begins and -1 where it ends: the running sum counts the queries that see a key.
    row = jnp.arange(first.shape[0])[:, None]
    change = jnp.zeros((first.shape[0], keys + 1), jnp.int32).at[row, first].add(1).at[row, end].add(-1)
    return jnp.cumsum(change, axis=1)[:, :-1] > 0


def whole_blocks(x: Array, block: int, axis: int = 1) -> Array:
    """Pad an axis with zeros to whole blocks; padded bounds are (0, 0), so the padded queries see no key."""
    padding = -x.shape[axis] % block
    return jnp.pad(x, [(0, padding if dimension == axis else 0) for dimension in range(x.ndim)]) if padding else x


def _extremes(first: Int[Array, "b s"], end: Int[Array, "b s"], block: int, keys: int) -> _Extremes:
    """Compute `_Extremes` of each block of queries.

    Queries that see no key, and padding of the last block, do not widen a range, but keep a block from being full.
    """
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
    """Return the index of the first True, or the length if there is none."""
    return jnp.where(jnp.any(flags, axis=-1), jnp.argmax(flags, axis=-1), flags.shape[-1]).astype(jnp.int32)


def _end_of_true(flags: Bool[Array, "b y x"]) -> Int[Array, "b y"]:
    """Return one past the index of the last True, or 0 if there is none."""
    return jnp.max(jnp.where(flags, jnp.arange(1, flags.shape[-1] + 1), 0), axis=-1).astype(jnp.int32)
