"""The packing plan: which part of which document stands in which row, from (seed, epoch, lengths) alone.

Best fit: documents come in the epoch's order, each into the fullest row that still has room for it. Nothing here knows
of processes or devices, so any number of them agrees on every row.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Bool, Int64

# Rows that stay open when the order of the documents matters (data.shuffle=False): enough to fill them, few enough
# that a document stays near its place.
_OPEN_ROWS_IN_ORDER = 64


@dataclass(frozen=True)
class Pieces:
    """Parts of documents that are short enough for a row; the same in each epoch.

    Attributes:
        document, start, length: which tokens of which document.
        dropped: documents that are left out for being too long.
        cut: documents of which only the beginning is left.
    """

    document: Int64[np.ndarray, "pieces"]
    start: Int64[np.ndarray, "pieces"]
    length: Int64[np.ndarray, "pieces"]
    dropped: Bool[np.ndarray, "documents"]
    cut: Bool[np.ndarray, "documents"]


@dataclass(frozen=True)
class RowPlan:
    """One epoch: row i holds the pieces order[bounds[i]:bounds[i + 1]], in that order."""

    order: Int64[np.ndarray, "pieces"]
    bounds: Int64[np.ndarray, "rows+1"]

    def __len__(self) -> int:
        return len(self.bounds) - 1


def cut_to_rows(
    lengths: Int64[np.ndarray, "documents"],
    seq_len: int,
    truncation: Literal["auto", "delete", "right", "split"],
    continuous: Bool[np.ndarray, "documents"],
) -> Pieces:
    """Applies data.truncation to the documents that are longer than a row.

    `auto` splits running text (`continuous`) and deletes the rest. When a document is split, its last token alone makes
    no piece: it is the target of the token before, and has none itself.
    """
    long = lengths > seq_len
    split = long & (continuous if truncation == "auto" else truncation == "split")
    cut = long & (truncation == "right")
    count = np.where(split, (lengths - 2) // seq_len + 1, np.where(long & ~cut, 0, 1))
    document = np.repeat(np.arange(len(lengths)), count)
    first = np.cumsum(count) - count
    start = (np.arange(len(document)) - first[document]) * seq_len
    return Pieces(document, start, np.minimum(lengths[document] - start, seq_len), dropped=count == 0, cut=cut)


def plan(
    lengths: Int64[np.ndarray, "pieces"],
    seq_len: int,
    seed: int,
    epoch: int,
    packing: bool = True,
    shuffle: bool = True,
) -> RowPlan:
    """Rows of one epoch, for pieces of at most seq_len tokens.

    Each piece stands in exactly one row. Without packing a row holds one piece; without shuffle documents keep their
    order (nearly, when packed).
    """
    order = _shuffled(len(lengths), seed, epoch) if shuffle else np.arange(len(lengths))
    if not packing:
        return RowPlan(order, np.arange(len(lengths) + 1))
    row = _best_fit(lengths[order].tolist(), seq_len, None if shuffle else _OPEN_ROWS_IN_ORDER)
    order = order[np.argsort(row, kind="stable")]
    return RowPlan(order, np.concatenate([[0], np.cumsum(np.bincount(row))]))


def _shuffled(count: int, seed: int, epoch: int) -> Int64[np.ndarray, "count"]:
    """A permutation that no version of numpy changes: only raw streams of its bit generators are promised for ever."""
    return np.argsort(np.random.Philox(np.random.SeedSequence([seed, epoch])).random_raw(count), kind="stable")


def _best_fit(lengths: list[int], seq_len: int, max_open: int | None) -> Int64[np.ndarray, "pieces"]:
    """The row of each piece. Rows are kept by their free space; a bit set tells which sizes of free space there are."""
    open_rows: list[list[int]] = [[] for _ in range(seq_len + 1)]
    sizes = 0
    free: list[int] = []
    oldest = 0
    result = np.empty(len(lengths), np.int64)
    for i, length in enumerate(lengths):
        fitting = sizes >> length
        if fitting:
            space = length + (fitting & -fitting).bit_length() - 1
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
