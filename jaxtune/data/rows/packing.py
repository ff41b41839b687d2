"""The packing plan: the parts of documents that each row holds. It depends only on (seed, epoch, lengths).

A parcel is a unit, or one piece of a document that is split. The plan does not depend on processes or devices, so all
processes agree on every row, whatever their number. Rows have room for a number of tokens and, if documents have
images, for a number of patches (vision.patches_per_row).
"""

from dataclasses import dataclass
from itertools import repeat
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Int64

from jaxtune.data.rows.two_budgets import best_fit, first_fit, next_fit
from jaxtune.errors import UserError

# Rows that may be open at the same time if the order of the documents matters (data.shuffle=False): enough to fill the
# rows well, few enough that a document stays near its place in the order.
_OPEN_ROWS_IN_ORDER = 64
# data.group_by_length sorts the rows of this many steps by length (as in transformers). Sorting the whole epoch would
# put the same documents into a step in each epoch.
_STEPS_SORTED = 50

Method = Literal["best_fit", "first_fit_decreasing", "sequential"]


class Patches(NamedTuple):
    """The patches of images of each document, or of each parcel, and the most patches of a row."""

    counts: Int64[np.ndarray, "n"]
    per_row: int


@dataclass(frozen=True)
class Pieces:
    """Parts of documents that each fit into a row; the same in every epoch.

    Attributes:
        document: the document of each piece.
        start: index in the document of the piece's first token.
        length: number of tokens of each piece.
        parcel: number of the piece's parcel, in ascending order; the pieces of a parcel go into the same row.
        dropped: whether each document is left out because it is too long, or has too many patches.
        cut: whether only the beginning or the end of each document is kept.
    """

    document: Int64[np.ndarray, "pieces"]
    start: Int64[np.ndarray, "pieces"]
    length: Int64[np.ndarray, "pieces"]
    parcel: Int64[np.ndarray, "pieces"]
    dropped: Bool[np.ndarray, "documents"]
    cut: Bool[np.ndarray, "documents"]


@dataclass(frozen=True)
class RowPlan:
    """The rows of one epoch: row i holds the parcels order[bounds[i]:bounds[i + 1]], in that order.

    Attributes:
        order: the parcels, row after row.
        bounds: index in `order` of each row's first parcel, and the number of parcels.
    """

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
    images: Patches | None = None,
) -> Pieces:
    """Apply data.truncation to the units that are longer than a row.

    `auto` splits running text (`continuous`) and deletes other long documents. If a document is split, its last token
    is never a piece of its own: it is the target of the token before it, and has no target itself. A unit of several
    documents is kept or deleted whole. A unit with images is kept, or deleted if its tokens or patches do not fit.

    Args:
        lengths: tokens of each document.
        seq_len: the length of a row.
        truncation: data.truncation.
        continuous: whether each document is running text.
        units: index of the first document of each unit, and the number of documents; None: each document is a unit.
        images: the patches of each document; None: no document has images.

    Raises:
        UserError: a unit of several documents would have to be cut.
    """
    units = np.arange(len(lengths) + 1) if units is None else units
    sizes = np.diff(units)
    together = np.repeat(sizes > 1, sizes)
    # The documents of a unit share a row, so the unit is long or not as a whole.
    too_long = np.repeat(np.add.reduceat(lengths, units[:-1]), sizes) > seq_len
    if images is None:
        long, deleted = too_long, np.zeros(len(lengths), bool)
    else:
        patches = np.repeat(np.add.reduceat(images.counts, units[:-1]), sizes)
        long = too_long & (patches == 0)
        deleted = (too_long & (patches > 0)) | (patches > images.per_row)
    if truncation in ("left", "right", "split") and (long & together).any():
        raise UserError(
            f"data.truncation={truncation!r} would cut documents that belong together and are longer than "
            f"data.seq_len={seq_len} tokens; choose 'delete', or raise data.seq_len"
        )
    split = long & ~together & (continuous if truncation == "auto" else truncation == "split")
    cut = long & (truncation in ("left", "right"))
    # A split document has ceil((length - 1) / seq_len) pieces, because a last token by itself makes none. A document
    # that is kept has one piece, one that is deleted has none.
    count = np.where(split, (lengths - 2) // seq_len + 1, np.where((long & ~cut) | deleted, 0, 1))
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
    images: Patches | None = None,
) -> RowPlan:
    """Plan the rows of one epoch, for parcels that each fit into a row. Each parcel goes into exactly one row.

    Args:
        lengths: tokens of each parcel.
        seq_len: the length of a row.
        seed: seed of the order.
        epoch: number of the epoch; each has its own order.
        method: data.packing_method; None: a row holds one parcel.
        shuffle: whether to shuffle the parcels. Otherwise they keep their order, or nearly so with best_fit;
            first_fit_decreasing sorts them in either case.
        rows_per_step: rows of a step, which get similar lengths; used only without a method. None: no grouping.
        groups: the group of each parcel. Groups come one after the other, each shuffled by itself.
        images: the patches of each parcel; None: no parcel has images.
    """
    images = images if images is not None and images.counts.any() else None
    order = stable_permutation(len(lengths), seed, epoch) if shuffle else np.arange(len(lengths))
    # A stable sort keeps the shuffled order inside each group.
    order = order if groups is None else order[np.argsort(groups[order], kind="stable")]
    if method is None:
        order = order if rows_per_step is None else _group_by_length(order, lengths, seed, epoch, rows_per_step)
        return RowPlan(order, np.arange(len(lengths) + 1))
    if method == "first_fit_decreasing":
        # By the larger of a parcel's shares of the two budgets; without images, by its length.
        sizes = lengths if images is None else np.maximum(lengths * images.per_row, images.counts * seq_len)
        order = order[np.argsort(-sizes[order], kind="stable")]
    # Lengths are read through a memoryview, because a list of 100 million takes gigabytes.
    ordered = lengths[order].data
    # A shuffled epoch has no order to preserve, so rows stay open without a bound.
    max_open = None if shuffle and groups is None else _OPEN_ROWS_IN_ORDER
    if images is not None:
        patches = images.counts[order].data
        match method:
            case "best_fit":
                row = best_fit(ordered, patches, seq_len, images.per_row, max_open)
            case "first_fit_decreasing":
                row = first_fit(ordered, patches, seq_len, images.per_row)
            case "sequential":
                row = next_fit(ordered, patches, seq_len, images.per_row)
    else:
        match method:
            case "best_fit":
                row = _best_fit(ordered, seq_len, max_open)
            case "first_fit_decreasing":
                row = _first_fit(ordered, seq_len)
            case "sequential":
                row = next_fit(ordered, repeat(0), seq_len, 0)  # no parcel has patches
    if method == "first_fit_decreasing":  # otherwise the longest documents would be trained first
        row = stable_permutation(row.max() + 1, seed, epoch, 1)[row]
    # Parcels row after row; inside a row they keep their order.
    order = order[np.argsort(row, kind="stable")]
    return RowPlan(order, np.concatenate([[0], np.cumsum(np.bincount(row))]))  # bincount: parcels of each row


def stable_permutation(count: int, seed: int, epoch: int, *purpose: int) -> Int64[np.ndarray, "count"]:
    """Return a permutation that is the same in every numpy version.

    numpy guarantees only the raw stream of a bit generator, not the distributions that it derives from the stream.

    Args:
        count: length of the permutation.
        seed: data.seed.
        epoch: number of the epoch.
        purpose: numbers that give different uses of one seed different permutations.
    """
    seeds = np.random.SeedSequence([seed, epoch], spawn_key=purpose)
    return np.argsort(np.random.Philox(seeds).random_raw(count), kind="stable")


def _group_by_length(
    order: Int64[np.ndarray, "rows"],
    lengths: Int64[np.ndarray, "rows"],
    seed: int,
    epoch: int,
    rows_per_step: int,
) -> Int64[np.ndarray, "rows"]:
    """Return an order in which a step's rows have similar lengths, and steps come in random order of their lengths."""
    count = len(order)
    # A step may span two epochs: rows before `begin` finish a step of the last epoch, and rows from `end` on begin one
    # that the next epoch finishes. Only the steps between are shuffled.
    begin = min(-epoch * count % rows_per_step, count)
    end = begin + (count - begin) // rows_per_step * rows_per_step
    pool = (np.arange(count) - begin) // (_STEPS_SORTED * rows_per_step)
    # By pool, then by length: lexsort's last key comes first. Rows before `begin` are pool -1, so they stay in front.
    order = order[np.lexsort((lengths[order], pool))]
    steps = order[begin:end].reshape(-1, rows_per_step)
    return np.concatenate([order[:begin], steps[stable_permutation(len(steps), seed, epoch, 2)].ravel(), order[end:]])


def _best_fit(lengths: memoryview, seq_len: int, max_open: int | None) -> Int64[np.ndarray, "parcels"]:
    """Return the row of each parcel: the one with the least space that suffices.

    The time does not depend on the number of open rows: rows are listed by their free space, and a bit set of the
    spaces that occur finds the smallest one that suffices with a shift and a mask.
    """
    open_rows: list[list[int]] = [[] for _ in range(seq_len + 1)]  # open_rows[n]: rows with n free positions
    sizes = 0  # an integer as a bit set: bit n is set if open_rows[n] is not empty
    free: list[int] = []  # free positions of each row
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
            # Close the oldest row, full or not, so that a late document cannot land far before its neighbours.
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


def _first_fit(lengths: memoryview, seq_len: int) -> Int64[np.ndarray, "parcels"]:
    """Return the row of each parcel: the first with room for it, in time logarithmic in the number of rows."""
    # Two neighbouring rows hold more than seq_len tokens together; otherwise the second would not have been opened.
    most_rows = min(len(lengths), 2 * sum(lengths) // seq_len + 1)
    leaves = 1 << (most_rows - 1).bit_length()
    # A binary tree of free positions: a leaf is a row, any other node i has the maximum of its children 2i and 2i + 1.
    free = [seq_len] * (2 * leaves)
    result = np.empty(len(lengths), np.int64)
    for i, length in enumerate(lengths):
        node = 1
        while node < leaves:
            node *= 2
            # To the left child if any of its rows has room: this leads to the first row with room.
            node += free[node] < length
        result[i] = node - leaves
        free[node] -= length
        while node > 1:
            node //= 2
            most = max(free[2 * node], free[2 * node + 1])
            # If this maximum stays the same, so do all above it.
            if free[node] == most:
                break
            free[node] = most
    return result
