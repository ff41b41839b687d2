"""The packing plan: every piece once, no row too long, the same for the same seed."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtune.data.rows.packing import Patches, cut_to_rows, plan

SEQ_LEN = 16
LENGTHS = st.lists(st.integers(1, SEQ_LEN), min_size=1, max_size=60).map(np.array)
METHODS = [None, "best_fit", "first_fit_decreasing", "sequential"]


@given(
    lengths=LENGTHS,
    seed=st.integers(0, 2**31),
    epoch=st.integers(0, 9),
    method=st.sampled_from(METHODS),
    shuffle=st.booleans(),
    rows_per_step=st.sampled_from([None, 1, 4, 100]),
)
@settings(deadline=None)
def test_each_piece_stands_in_one_row_and_no_row_is_too_long(lengths, seed, epoch, method, shuffle, rows_per_step):
    packing = plan(lengths, SEQ_LEN, seed, epoch, method, shuffle, rows_per_step)
    assert sorted(packing.order) == list(range(len(lengths)))
    assert packing.bounds[0] == 0 and packing.bounds[-1] == len(lengths) and len(packing) == len(packing.bounds) - 1
    in_row = np.add.reduceat(lengths[packing.order], packing.bounds[:-1])
    assert (np.diff(packing.bounds) >= 1).all() and in_row.max() <= SEQ_LEN
    if method is None:
        assert len(packing) == len(lengths)
    again = plan(lengths, SEQ_LEN, seed, epoch, method, shuffle, rows_per_step)
    assert np.array_equal(packing.order, again.order) and np.array_equal(packing.bounds, again.bounds)


def rows_by_definition(lengths, method, images=None):
    """Return the documents of each row, by a search through all rows."""
    rows, room = [], lambda row: SEQ_LEN - lengths[row].sum()
    counts, most = images or (np.zeros_like(lengths), 1)
    if method == "first_fit_decreasing":
        order = sorted(range(len(lengths)), key=lambda i: -max(lengths[i] * most, counts[i] * SEQ_LEN))
    else:
        order = range(len(lengths))
    for i in order:
        with_room = [row for row in rows if room(row) >= lengths[i] and most - counts[row].sum() >= counts[i]]
        open_rows = [row for row in with_room if method != "sequential" or row is rows[-1]]
        if not open_rows:
            rows.append([i])
        elif method == "best_fit":
            min(open_rows, key=room).append(i)
        else:
            open_rows[0].append(i)
    return rows


@given(lengths=LENGTHS, method=st.sampled_from(METHODS[1:]))
@settings(deadline=None)
def test_a_document_goes_into_the_row_that_the_method_names(lengths, method):
    shuffle = method == "first_fit_decreasing"  # sorts what was shuffled: lengths identify documents
    packing = plan(lengths, SEQ_LEN, 0, 0, method, shuffle)
    rows, expected = np.split(packing.order, packing.bounds[1:-1]), rows_by_definition(lengths, method)
    if method == "sequential":
        assert [row.tolist() for row in rows] == expected
        assert packing.order.tolist() == list(range(len(lengths)))
    elif method == "best_fit":  # of rows with the same room, any is a best fit
        assert len(rows) == len(expected)
        assert sorted(lengths[row].sum() for row in rows) == sorted(lengths[row].sum() for row in expected)
    else:
        assert sorted(lengths[row].tolist() for row in rows) == sorted(lengths[row].tolist() for row in expected)


@given(
    lengths=st.lists(st.integers(2, 5 * SEQ_LEN), min_size=1, max_size=30).map(np.array),
    truncation=st.sampled_from(["auto", "delete", "left", "right", "split"]),
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
        length_left = len(positions)
        if truncation == "left" and length > SEQ_LEN:
            assert positions == list(range(length - SEQ_LEN, length)) and pieces.cut[i]
            continue
        assert positions == list(range(length_left))
        if length <= SEQ_LEN:
            assert length_left == length
        elif truncation == "split" or (truncation == "auto" and continuous[i]):
            assert length_left >= length - 1  # every token is a target; a last token on its own would have none
        elif truncation == "right":
            assert length_left == SEQ_LEN and pieces.cut[i]
        else:
            assert length_left == 0 and pieces.dropped[i]


PATCHES = st.integers(0, 4 * SEQ_LEN).flatmap(
    lambda most: st.lists(st.integers(0, most), min_size=60, max_size=60).map(np.array)
)


@given(
    lengths=LENGTHS,
    patches=PATCHES,
    seed=st.integers(0, 2**31),
    method=st.sampled_from(METHODS),
    shuffle=st.booleans(),
)
@settings(deadline=None)
def test_rows_have_room_for_the_patches_too(lengths, patches, seed, method, shuffle):
    images = Patches(patches[: len(lengths)], per_row=4 * SEQ_LEN)
    packing = plan(lengths, SEQ_LEN, seed, 0, method, shuffle, images=images)
    assert sorted(packing.order) == list(range(len(lengths)))
    for values, most in ((lengths, SEQ_LEN), images):
        assert np.add.reduceat(values[packing.order], packing.bounds[:-1]).max() <= most
    again = plan(lengths, SEQ_LEN, seed, 0, method, shuffle, images=images)
    assert np.array_equal(packing.order, again.order) and np.array_equal(packing.bounds, again.bounds)


@given(lengths=LENGTHS, seed=st.integers(0, 9), method=st.sampled_from(METHODS), shuffle=st.booleans())
@settings(deadline=None)
def test_images_that_leave_room_in_every_row_change_no_plan(lengths, seed, method, shuffle):
    """The packing by two budgets is the packing by one if the other is never used up."""
    expected = plan(lengths, SEQ_LEN, seed, 0, method, shuffle)
    for patches in (np.zeros_like(lengths), np.ones_like(lengths), 2 * lengths):
        packing = plan(lengths, SEQ_LEN, seed, 0, method, shuffle, images=Patches(patches, 2 * SEQ_LEN))
        assert np.array_equal(packing.order, expected.order) and np.array_equal(packing.bounds, expected.bounds)


@given(lengths=LENGTHS, patches=PATCHES, method=st.sampled_from(METHODS[1:]))
@settings(deadline=None)
def test_a_document_with_images_goes_into_the_row_that_the_method_names(lengths, patches, method):
    images = Patches(patches[: len(lengths)], per_row=4 * SEQ_LEN)
    packing = plan(lengths, SEQ_LEN, 0, 0, method, shuffle=False, images=images)
    rows = [row.tolist() for row in np.split(packing.order, packing.bounds[1:-1])]
    if method != "best_fit":
        expected = rows_by_definition(lengths, method, images)
        # first_fit_decreasing shuffles the rows.
        assert sorted(rows) == sorted(expected) if method == "first_fit_decreasing" else rows == expected
        return
    free, opened = [(SEQ_LEN, images.per_row)] * len(rows), 0
    row_of = {i: number for number, row in enumerate(rows) for i in row}
    for i, (length, count) in enumerate(zip(lengths, images.counts)):
        fitting = [space for space, room in free[:opened] if space >= length and room >= count]
        space, room = free[row_of[i]]
        if row_of[i] == opened:
            assert not fitting
            opened += 1
        else:
            assert space == min(fitting)
        free[row_of[i]] = space - length, room - count


@given(
    documents=st.lists(st.tuples(st.integers(2, 3 * SEQ_LEN), st.integers(0, 12)), min_size=1, max_size=30),
    truncation=st.sampled_from(["auto", "delete", "left", "right", "split"]),
    continuous=st.booleans(),
)
@settings(deadline=None)
def test_a_document_with_images_is_never_cut(documents, truncation, continuous):
    lengths, patches = np.array(documents).T
    running = np.full(len(lengths), continuous)
    pieces = cut_to_rows(lengths, SEQ_LEN, truncation, running, images=Patches(patches, per_row=8))
    for i, (length, count) in enumerate(documents):
        of_document = pieces.document == i
        if count:
            fits = length <= SEQ_LEN and count <= 8
            assert pieces.length[of_document].tolist() == [length] * fits
            assert pieces.dropped[i] == (not fits) and not pieces.cut[i]
        else:
            [alone] = [cut_to_rows(lengths[i : i + 1], SEQ_LEN, truncation, running[:1])]
            assert np.array_equal(pieces.length[of_document], alone.length)
            assert np.array_equal(pieces.start[of_document], alone.start) and pieces.cut[i] == alone.cut[0]


def test_a_unit_whose_images_do_not_fit_is_left_out_whole():
    """Pairs of answers: too many patches together, too many tokens together, and one that fits."""
    lengths, patches = np.array([4, 4, 9, 9, 4, 4]), np.array([5, 5, 2, 2, 4, 4])
    units, whole = np.array([0, 2, 4, 6]), np.zeros(6, bool)
    for truncation in ("auto", "right"):
        pieces = cut_to_rows(lengths, SEQ_LEN, truncation, whole, units, Patches(patches, per_row=8))
        assert pieces.dropped.tolist() == [True] * 4 + [False] * 2 and pieces.document.tolist() == [4, 5]
        assert pieces.parcel.tolist() == [0, 0]


def realistic_lengths(count):
    return np.clip(np.random.default_rng(0).lognormal(5.8, 1.0, count), 2, 2048).astype(np.int64)


@pytest.mark.parametrize(
    ("method", "shuffle", "full"),
    [
        ("best_fit", True, 0.996),
        ("best_fit", False, 0.994),
        ("first_fit_decreasing", True, 1.0),
        ("sequential", True, 0.806),
        ("sequential", False, 0.807),
        (None, True, 0.245),
    ],
)
def test_100k_documents_are_planned_in_seconds_and_fill_the_rows(method, shuffle, full):
    """The rows are as full as docs/reference/data.md says."""
    lengths = realistic_lengths(100_000)
    start = time.process_time()
    packing = plan(lengths, 2048, 0, 0, method, shuffle)
    assert time.process_time() - start < 5
    assert lengths.sum() / (len(packing) * 2048) == pytest.approx(full, abs=1e-3)


@pytest.mark.parametrize("method", METHODS)
def test_each_epoch_and_seed_has_an_order_of_its_own(method):
    lengths = realistic_lengths(500)
    orders = [plan(lengths, 2048, seed, epoch, method).order for seed, epoch in ((0, 0), (0, 1), (1, 0))]
    for i in range(3):
        assert not np.array_equal(orders[i], orders[i - 1])


def test_the_order_is_the_same_for_ever():
    """A run may be resumed years later, with another numpy."""
    lengths = np.array([5, 9, 3, 8, 7, 2])
    packing = plan(lengths, 10, seed=7, epoch=1)
    assert packing.order.tolist() == [1, 4, 2, 3, 5, 0] and packing.bounds.tolist() == [0, 1, 3, 5, 6]
    packing = plan(lengths, 10, 7, 1, "first_fit_decreasing")
    assert packing.order.tolist() == [0, 3, 5, 4, 2, 1] and packing.bounds.tolist() == [0, 1, 3, 5, 6]
    assert plan(lengths, 10, 7, 1, "sequential").bounds.tolist() == [0, 1, 2, 3, 6]
    assert plan(lengths, 10, 7, 1, None, rows_per_step=2).order.tolist() == [3, 1, 0, 4, 5, 2]


def test_without_shuffle_documents_stay_near_their_place():
    lengths = realistic_lengths(20_000)
    order = plan(lengths, 2048, seed=0, epoch=0, shuffle=False).order
    assert np.abs(order - np.arange(len(order))).max() < 2000
    assert plan(lengths, 2048, 0, 0, None, shuffle=False).order.tolist() == list(range(20_000))


def test_the_longest_documents_are_not_trained_first():
    lengths = realistic_lengths(20_000)
    packing = plan(lengths, 2048, 0, 0, "first_fit_decreasing")
    longest = lengths[packing.order[packing.bounds[:-1]]]
    assert abs(np.corrcoef(longest, np.arange(len(longest)))[0, 1]) < 0.05


@pytest.mark.parametrize("epoch", [0, 3])
def test_rows_of_a_step_have_like_lengths_and_steps_any_order(epoch):
    """Also if an epoch begins in the middle of a step: 10 001 rows are 1250 steps of 8 and one row."""
    lengths = np.arange(2, 10_003)

    def steps(epoch, rows_per_step):
        order = plan(lengths, 2**14, 0, epoch, None, rows_per_step=rows_per_step).order[-epoch * len(lengths) % 8 :]
        return order[: len(order) // 8 * 8].reshape(-1, 8)

    def padding(lengths_of_rows):
        return (lengths_of_rows.max(1, keepdims=True) - lengths_of_rows).sum() / lengths_of_rows.sum()

    grouped = lengths[steps(epoch, 8)]
    assert padding(grouped) < 0.05 and padding(lengths[steps(epoch, None)]) > 0.5
    longest = grouped.max(1)
    assert abs(np.corrcoef(longest[1:], longest[:-1])[0, 1]) < 0.1
    together = [set(map(frozenset, steps(epoch + later, 8).tolist())) for later in (0, 1)]
    assert len(together[0] & together[1]) <= 1  # documents meet others in each epoch
