"""The intervals of visible keys, and the block ranges derived from them, against a brute-force definition."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels.attention_cases import key_start

from pallas_kernels.flash_attention import blocks
from pallas_kernels.flash_attention.mask import MaskSpec, intervals
from pallas_kernels.flash_attention.reference import visible

QUERIES, KEYS = 20, 28

documents = st.lists(st.just(1) | st.integers(1, 12), max_size=8).map(
    lambda row: tuple(np.diff(np.minimum(np.cumsum([0, *row]), QUERIES)))
)
packings = st.none() | st.tuples(documents, documents).map(lambda rows: key_start(rows, QUERIES))
offsets = st.just(0) | st.integers(-30, 40)
# Causality, a window, and the end of each query's keys.
limits = (
    st.tuples(st.just(True), st.none() | st.integers(1, 30), st.none())
    | st.just((False, None, None))
    | st.tuples(
        st.just(False),
        st.none() | st.integers(1, 30),
        st.lists(st.integers(-3, KEYS + 3), min_size=2 * QUERIES, max_size=2 * QUERIES).map(
            lambda ends: np.array(ends, np.int32).reshape(2, QUERIES)
        ),
    )
)


def by_definition(mask: MaskSpec, keys: int) -> np.ndarray:
    """The definition in MaskSpec's docstring, (2, queries, keys)."""
    place, key = np.arange(QUERIES)[:, None] + mask.query_offset, np.arange(keys)
    seen = np.ones((2, QUERIES, keys), bool)
    if mask.causal:
        seen &= key <= place
    if mask.window is not None:
        seen &= key > place - mask.window
    if mask.key_start is not None:
        seen &= key >= np.asarray(mask.key_start)[:, :, None]
    if mask.key_end is not None:
        seen &= key < np.asarray(mask.key_end)[:, :, None]
    return seen


@given(limits=limits, start=packings, offset=offsets, traced=st.booleans())
@settings(deadline=None)
def test_intervals_are_the_definition(limits, start, offset, traced):
    causal, window, key_end = limits
    mask = MaskSpec(causal, window, start, offset, key_end=key_end)
    given = replace(mask, query_offset=jnp.int32(offset) if traced else offset)
    given = replace(given, key_end=None if key_end is None else jnp.asarray(key_end))
    first, end = intervals(given, 2, QUERIES, KEYS)
    expected = by_definition(mask, KEYS)
    assert first.dtype == end.dtype == jnp.int32
    np.testing.assert_array_equal(visible(first, end, KEYS), expected)
    blind = ~expected.any(axis=2)
    assert not np.asarray(first)[blind].any() and not np.asarray(end)[blind].any()


@given(window=st.none() | st.integers(1, 30), start=packings, places=st.permutations(range(QUERIES)))
@settings(deadline=None)
def test_queries_in_any_order_see_what_they_see_in_order(window, start, places):
    in_order = intervals(MaskSpec(window=window, key_start=start), 2, QUERIES, QUERIES)
    own = np.asarray(places)
    offsets = jnp.broadcast_to(own - np.arange(QUERIES), (2, QUERIES))
    dealt = MaskSpec(window=window, key_start=None if start is None else start[:, own], query_offset=offsets)
    for expected, found in zip(in_order, intervals(dealt, 2, QUERIES, QUERIES)):
        np.testing.assert_array_equal(found, expected[:, own])


def test_masks_that_mean_nothing_are_refused():
    with pytest.raises(ValueError, match="at least 1"):
        MaskSpec(window=0)
    with pytest.raises(ValueError, match="causal=True or key_end"):
        MaskSpec(causal=False, window=3)
    with pytest.raises(ValueError, match="key_end needs causal=False"):
        MaskSpec(key_end=jnp.ones((1, 8), jnp.int32))


key_blocks = jax.jit(blocks.key_blocks, static_argnums=(2, 3, 4))
query_blocks = jax.jit(blocks.query_blocks, static_argnums=(2, 3, 4))


def check(ranges: np.ndarray, tiles: np.ndarray, tight: bool) -> None:
    """`tiles` (rows, outer, inner, elements): visibility in each pair of blocks; False past the ends of the arrays."""
    assert ranges.dtype == np.int32 and ranges.shape == (*tiles.shape[:2], 4)
    some, full = tiles.any(axis=-1), tiles.all(axis=-1)
    for row, outer in np.ndindex(*tiles.shape[:2]):
        begin, full_begin, full_end, stop = ranges[row, outer]
        assert 0 <= begin <= full_begin <= full_end <= stop <= tiles.shape[2]
        inside = np.zeros(tiles.shape[2], bool)
        inside[begin:stop] = True
        assert not some[row, outer][~inside].any()
        assert full[row, outer, full_begin:full_end].all()
        if tight:
            assert full_end - full_begin == full[row, outer].sum()
            touched = np.flatnonzero(some[row, outer])
            assert (begin == stop) if touched.size == 0 else (begin, stop) == (touched[0], touched[-1] + 1)


def tiled(seen: np.ndarray, block_q: int, block_k: int) -> np.ndarray:
    """(b, query blocks, key blocks, elements)."""
    padding = ((0, 0), (0, -seen.shape[1] % block_q), (0, -seen.shape[2] % block_k))
    seen = np.pad(seen, padding)
    batch, queries, keys = seen.shape
    seen = seen.reshape(batch, queries // block_q, block_q, keys // block_k, block_k).swapaxes(2, 3)
    return seen.reshape(*seen.shape[:3], -1)


@given(
    causal_and_window=st.tuples(st.just(True), st.none() | st.integers(1, 30)) | st.just((False, None)),
    start=packings,
    offset=offsets,
    sizes=st.sampled_from([(4, 4), (8, 4), (4, 8), (16, 16)]),
)
@settings(deadline=None, max_examples=200)
def test_ranges_of_blocks(causal_and_window, start, offset, sizes):
    """No visible pair is lost, no block is wrongly called fully visible, and documents in order leave nothing to cut.

    With an offset they may: the parts of two documents that the queries of a block see need not be adjacent.
    """
    mask = MaskSpec(*causal_and_window, start, offset)
    first, end = intervals(mask, 2, QUERIES, KEYS)
    tiles = tiled(by_definition(mask, KEYS), *sizes)
    tight = start is None or offset == 0
    check(np.asarray(key_blocks(first, end, KEYS, *sizes)), tiles, tight)
    check(np.asarray(query_blocks(first, end, KEYS, *sizes)), tiles.swapaxes(1, 2), tight)


@given(
    documents=documents,
    spans=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    window=st.none() | st.integers(1, 30),
    sizes=st.sampled_from([(4, 4), (8, 4), (4, 8), (16, 16)]),
)
@settings(deadline=None, max_examples=100)
def test_ranges_of_blocks_of_packed_images(documents, spans, window, sizes):
    """Queries that see to the end of their span leave nothing to cut either, because first keys and ends ascend."""
    stops = np.minimum(np.cumsum(spans), QUERIES)
    key_end = np.arange(1, QUERIES + 1, dtype=np.int32)
    for start, stop in zip((0, *stops[:-1]), stops):
        key_end[start:stop] = stop
    mask = MaskSpec(False, window, key_start((documents,), QUERIES), key_end=jnp.asarray(key_end[None]))
    first, end = intervals(mask, 1, QUERIES, QUERIES)
    tiles = tiled(np.asarray(visible(first, end, QUERIES)), *sizes)
    check(np.asarray(key_blocks(first, end, QUERIES, *sizes)), tiles, tight=True)
    check(np.asarray(query_blocks(first, end, QUERIES, *sizes)), tiles.swapaxes(1, 2), tight=True)


@given(st.lists(st.tuples(st.integers(0, KEYS), st.integers(0, KEYS)), min_size=QUERIES, max_size=QUERIES))
@settings(deadline=None, max_examples=50)
def test_ranges_of_blocks_of_any_intervals(bounds):
    """In any order: no visible pair is lost, and no block is wrongly called fully visible."""
    first, end = (np.asarray([[bound[i] if bound[0] < bound[1] else 0 for bound in bounds]], np.int32) for i in (0, 1))
    tiles = tiled(np.asarray(visible(first, end, KEYS)), 4, 8)
    check(np.asarray(key_blocks(first, end, KEYS, 4, 8)), tiles, tight=False)
    check(np.asarray(query_blocks(first, end, KEYS, 4, 8)), tiles.swapaxes(1, 2), tight=False)
