"""The packing plan: which part of which document stands in which row, a function of (seed, epoch, lengths) alone.

A parcel is a unit, or one piece of a document that is split. The plan does not depend on processes or devices, so any
number of them agrees on every row.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Bool, Int64

from jaxtune.errors import UserError

# Rows that may be open at once when the order of the documents matters (data.shuffle=False): enough to fill the rows
# well, few enough that a document stays near its place in the order.
_OPEN_ROWS_IN_ORDER = 64
# Rows are sorted by length among those of so many steps (as in transformers), so that a document meets others in each
# epoch.
_STEPS_SORTED = 50

Method = Literal["best_fit", "first_fit_decreasing", "sequential"]


@dataclass(frozen=True)
class Pieces:
    """Parts of documents that each fit into a row; the same in every epoch.

    Attributes:
        document, start, length: the document of each piece, its first token in it, and its number of tokens.
        parcel: number of the piece's parcel, in ascending order; the pieces of a parcel stand in the same row.
        dropped: documents that are left out because they are too long.
        cut: documents of which only the beginning or the end is kept.
    """

    document: Int64[np.ndarray, "pieces"]
    start: Int64[np.ndarray, "pieces"]
    length: Int64[np.ndarray, "pieces"]
    parcel: Int64[np.ndarray, "pieces"]
    dropped: Bool[np.ndarray, "documents"]
    cut: Bool[np.ndarray, "documents"]


@dataclass(frozen=True)
class RowPlan:
    """One epoch: row i holds the parcels order[bounds[i]:bounds[i + 1]], in that order."""

    order: Int64[np.ndarray, "parcels"]
    bounds: Int64[np.ndarray, "rows+1"]

    def __len__(self) -> int:
        return len(self.bounds) - 1


def cut_to_rows(
    lengths: Int64[np.ndarray, "documents"],
    seq_len: int,
    truncation: Literal["auto", "delete", "left", "right", "split"],
    continuous: Bool[np.ndarray, "documents"],
    units: Int64[np.ndarray, "units+1"] | None = None,
) -> Pieces:
    """Applies data.truncation to the units that are longer than a row.

    `auto` splits running text (`continuous`) and deletes other long documents. When a document is split, its last token
    is never a piece of its own: it is the target of the token before it, and has no target itself. A unit of several
    documents is kept or deleted whole.

    Args:
        lengths: of the documents, in tokens.
        seq_len: the length of a row.
        truncation: data.truncation.
        continuous: which documents are running text.
        units: number of the first document of each unit, and the number of documents; None: each document is a unit.

    Raises:
        UserError: a unit of several documents would have to be cut.
    """
    units = np.arange(len(lengths) + 1) if units is None else units
    sizes = np.diff(units)
    together = np.repeat(sizes > 1, sizes)
    long = np.repeat(np.add.reduceat(lengths, units[:-1]), sizes) > seq_len
    if truncation in ("left", "right", "split") and (long & together).any():
        raise UserError(
            f"data.truncation={truncation!r} would cut documents that belong together and are longer than "
            f"data.seq_len={seq_len} tokens; choose 'delete', or raise data.seq_len"
        )
    split = long & ~together & (continuous if truncation == "auto" else truncation == "split")
    cut = long & (truncation in ("left", "right"))
    # A split document has ceil((length - 1) / seq_len) pieces, as its last token alone makes none.
    count = np.where(split, (lengths - 2) // seq_len + 1, np.where(long & ~cut, 0, 1))
    document = np.repeat(np.arange(len(lengths)), count)
    first = np.cumsum(count) - count
    start = (np.arange(len(document)) - first[document]) * seq_len
    if truncation == "left":
        start += np.where(cut, lengths - seq_len, 0)[document]
    length = np.minimum(lengths[document] - start, seq_len)
    opens = ~together
    opens[units[:-1]] = True  # the other documents of a unit follow its first into the same parcel
    parcel = np.cumsum(opens[document]) - 1
    return Pieces(document, start, length, parcel, dropped=count == 0, cut=cut)


def plan(
    lengths: Int64[np.ndarray, "parcels"],
    seq_len: int,
    seed: int,
    epoch: int,
    method: Method | None = "best_fit",
    shuffle: bool = True,
    rows_per_step: int | None = None,
    groups: Int64[np.ndarray, "parcels"] | None = None,
) -> RowPlan:
    """Rows of one epoch, for parcels of at most seq_len tokens. Each parcel stands in exactly one row.

    Args:
        lengths: of the parcels, in tokens.
        seq_len: the length of a row.
        seed, epoch: of the order.
        method: data.packing_method; None: a row holds one parcel.
        shuffle: whether the parcels have a new order. Without it they keep theirs, or nearly with best_fit;
            first_fit_decreasing sorts them all the same.
        rows_per_step: rows of a step, which get like lengths; only without a method. None: lengths do not matter.
        groups: of each parcel; all of a group come before those of the next, each group in a new order.
    """
    order = shuffled(len(lengths), seed, epoch) if shuffle else np.arange(len(lengths))
    order = order if groups is None else order[np.argsort(groups[order], kind="stable")]
    if method is None:
        order = order if rows_per_step is None else _grouped(order, lengths, seed, epoch, rows_per_step)
        return RowPlan(order, np.arange(len(lengths) + 1))
    if method == "best_fit":
        row = _best_fit(lengths[order].tolist(), seq_len, None if shuffle and groups is None else _OPEN_ROWS_IN_ORDER)
    elif method == "first_fit_decreasing":
        order = order[np.argsort(-lengths[order], kind="stable")]
        row = _first_fit(lengths[order].tolist(), seq_len)
        row = shuffled(row.max() + 1, seed, epoch, 1)[row]  # otherwise the longest documents would be trained first
    else:
        row = _next_fit(lengths[order].tolist(), seq_len)
    order = order[np.argsort(row, kind="stable")]
    return RowPlan(order, np.concatenate([[0], np.cumsum(np.bincount(row))]))


def shuffled(count: int, seed: int, epoch: int, *purpose: int) -> Int64[np.ndarray, "count"]:
    """A permutation that is the same in every numpy version: only a bit generator's raw stream is guaranteed stable."""
    seeds = np.random.SeedSequence([seed, epoch], spawn_key=purpose)
    return np.argsort(np.random.Philox(seeds).random_raw(count), kind="stable")


def _grouped(
    order: Int64[np.ndarray, "rows"],
    lengths: Int64[np.ndarray, "rows"],
    seed: int,
    epoch: int,
    rows_per_step: int,
) -> Int64[np.ndarray, "rows"]:
    """The order in which steps have rows of like lengths, and the lengths of one step say nothing of the next's."""
    count = len(order)
    begin = min(-epoch * count % rows_per_step, count)  # before it are rows of a step that began in the last epoch
    end = begin + (count - begin) // rows_per_step * rows_per_step  # from here on, of one that ends in the next
    pool = (np.arange(count) - begin) // (_STEPS_SORTED * rows_per_step)
    order = order[np.lexsort((lengths[order], pool))]
    steps = order[begin:end].reshape(-1, rows_per_step)
    return np.concatenate([order[:begin], steps[shuffled(len(steps), seed, epoch, 2)].ravel(), order[end:]])


def _best_fit(lengths: list[int], seq_len: int, max_open: int | None) -> Int64[np.ndarray, "parcels"]:
    """The row of each parcel, in time that does not grow with the number of open rows."""
    open_rows: list[list[int]] = [[] for _ in range(seq_len + 1)]  # open_rows[n]: rows with n free positions
    sizes = 0  # an integer as a bit set: bit n is set if open_rows[n] is not empty
    free: list[int] = []  # of each row
    oldest = 0  # the oldest row that may still be open
    result = np.empty(len(lengths), np.int64)
    for i, length in enumerate(lengths):
        fitting = sizes >> length
        if fitting:
            space = length + (fitting & -fitting).bit_length() - 1  # the lowest bit: the least space that suffices
            row = open_rows[space].pop()
            if not open_rows[space]:
                sizes ^= 1 << space
        else:
            space, row = seq_len, len(free)
            free.append(seq_len)
            if max_open is not None and row - oldest >= max_open:
                closed = open_rows[free[oldest]]
                if oldest in closed:
                    closed.remove(oldest)
                    if not closed:
                        sizes ^= 1 << free[oldest]
                oldest += 1
        free[row] = space - length
        if free[row]:
            open_rows[free[row]].append(row)
            sizes |= 1 << free[row]
        result[i] = row
    return result


def _first_fit(lengths: list[int], seq_len: int) -> Int64[np.ndarray, "parcels"]:
    """The row of each parcel: the first with room for it, in time that grows with the logarithm of the rows."""
    # Any two rows next to each other hold more than one row's tokens.
    most_rows = min(len(lengths), 2 * sum(lengths) // seq_len + 1)
    leaves = 1 << (most_rows - 1).bit_length()
    # A binary tree of free positions: a leaf is a row, any other node i has the most of its children 2i and 2i + 1.
    free = [seq_len] * (2 * leaves)
    result = np.empty(len(lengths), np.int64)
    for i, length in enumerate(lengths):
        node = 1
        while node < leaves:
            node *= 2
            node += free[node] < length
        result[i] = node - leaves
        free[node] -= length
        while node > 1:
            node //= 2
            most = max(free[2 * node], free[2 * node + 1])
            if free[node] == most:
                break
            free[node] = most
    return result


def _next_fit(lengths: list[int], seq_len: int) -> Int64[np.ndarray, "parcels"]:
    """The row of each parcel: the last one, or a new one if that has no room."""
    row, free = 0, seq_len
    result = np.empty(len(lengths), np.int64)
    for i, length in enumerate(lengths):
        if length > free:
            row, free = row + 1, seq_len
        free -= length
        result[i] = row
    return result
