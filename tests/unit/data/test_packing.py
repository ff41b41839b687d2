"""The packing plan: every piece once, no row too long, the same for the same seed."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtune.data.packing import cut_to_rows, plan

SEQ_LEN = 16
LENGTHS = st.lists(st.integers(1, SEQ_LEN), min_size=1, max_size=60).map(np.array)


@given(
    lengths=LENGTHS, seed=st.integers(0, 2**31), epoch=st.integers(0, 9), packing=st.booleans(), shuffle=st.booleans()
)
@settings(deadline=None)
def test_each_piece_stands_in_one_row_and_no_row_is_too_long(lengths, seed, epoch, packing, shuffle):
    found = plan(lengths, SEQ_LEN, seed, epoch, packing, shuffle)
    assert sorted(found.order) == list(range(len(lengths)))
    assert found.bounds[0] == 0 and found.bounds[-1] == len(lengths) and len(found) == len(found.bounds) - 1
    in_row = np.add.reduceat(lengths[found.order], found.bounds[:-1])
    assert (np.diff(found.bounds) >= 1).all() and in_row.max() <= SEQ_LEN
    if not packing:
        assert len(found) == len(lengths)
    again = plan(lengths, SEQ_LEN, seed, epoch, packing, shuffle)
    assert np.array_equal(found.order, again.order) and np.array_equal(found.bounds, again.bounds)


@given(
    lengths=st.lists(st.integers(2, 5 * SEQ_LEN), min_size=1, max_size=30).map(np.array),
    truncation=st.sampled_from(["auto", "delete", "right", "split"]),
    data=st.data(),
)
def test_documents_are_cut_as_truncation_says(lengths, truncation, data):
    continuous = np.array(data.draw(st.lists(st.booleans(), min_size=len(lengths), max_size=len(lengths))))
    pieces = cut_to_rows(lengths, SEQ_LEN, truncation, continuous)
    assert pieces.length.max(initial=0) <= SEQ_LEN
    for i, length in enumerate(lengths):
        positions = [
            position
            for start, count in zip(pieces.start[pieces.document == i], pieces.length[pieces.document == i])
            for position in range(start, start + count)
        ]
        kept = len(positions)
        assert positions == list(range(kept))
        if length <= SEQ_LEN:
            assert kept == length
        elif truncation == "split" or (truncation == "auto" and continuous[i]):
            assert kept >= length - 1  # every token is a target; a last one alone would have none itself
        elif truncation == "right":
            assert kept == SEQ_LEN and pieces.cut[i]
        else:
            assert kept == 0 and pieces.dropped[i]


def realistic_lengths(count):
    return np.clip(np.random.default_rng(0).lognormal(5.8, 1.0, count), 2, 2048).astype(np.int64)


@pytest.mark.parametrize("shuffle", [True, False])
def test_100k_documents_are_planned_in_seconds_and_fill_the_rows(shuffle):
    lengths = realistic_lengths(100_000)
    start = time.process_time()
    found = plan(lengths, 2048, seed=0, epoch=0, shuffle=shuffle)
    assert time.process_time() - start < 5
    assert lengths.sum() / (len(found) * 2048) >= 0.95


def test_each_epoch_and_seed_has_an_order_of_its_own():
    lengths = realistic_lengths(500)
    orders = [plan(lengths, 2048, seed, epoch).order for seed, epoch in ((0, 0), (0, 1), (1, 0))]
    for i in range(3):
        assert not np.array_equal(orders[i], orders[i - 1])


def test_the_order_is_the_same_for_ever():
    """A run may be resumed years later, with another numpy."""
    found = plan(np.array([5, 9, 3, 8, 7, 2]), 10, seed=7, epoch=1)
    assert found.order.tolist() == [1, 4, 2, 3, 5, 0] and found.bounds.tolist() == [0, 1, 3, 5, 6]


def test_without_shuffle_documents_stay_near_their_place():
    lengths = realistic_lengths(20_000)
    order = plan(lengths, 2048, seed=0, epoch=0, shuffle=False).order
    assert np.abs(order - np.arange(len(order))).max() < 2000
    assert plan(lengths, 2048, 0, 0, packing=False, shuffle=False).order.tolist() == list(range(20_000))
