"""Rows: random access to what is trained on, by one number that counts on through all epochs."""

import math
import threading
from bisect import bisect_right
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np

from jaxtune.config.schema import Data
from jaxtune.data.documents import Documents
from jaxtune.data.packing import RowPlan, cut_to_rows, plan
from jaxtune.errors import UserError

Row = dict[str, np.ndarray]

FIELDS = {
    "tokens": np.int32,
    "targets": np.int32,
    "positions": np.int32,
    "segment_ids": np.int32,
    "key_start": np.int32,
    "loss_weight": np.float32,
}
"""The arrays of a row, each (seq_len,)."""

# Rows of two epochs are asked for at once where one ends and the next begins.
_PLANS_KEPT = 2


@dataclass(frozen=True)
class Counts:
    """What became of the documents in the first epoch.

    Attributes:
        documents, tokens: that are in the rows.
        target_tokens: tokens of them that are trained.
        split_documents: long documents that go on in another row.
        truncated_documents, truncated_tokens: long documents that are cut, and what they lost.
        dropped_documents, dropped_tokens: documents left out: too long, or no target left after the cut.
        skipped_samples: bad samples left out under data.on_bad_row='skip'.
        rows: rows of an epoch.
        fill: part of the positions that hold a token.
    """

    documents: int
    tokens: int
    target_tokens: int
    split_documents: int
    truncated_documents: int
    truncated_tokens: int
    dropped_documents: int
    dropped_tokens: int
    skipped_samples: int
    rows: int
    fill: float

    def __str__(self) -> str:
        return (
            f"{self.documents:,} documents, {self.tokens:,} tokens ({self.target_tokens:,} trained) in {self.rows:,} "
            f"rows, {self.fill:.1%} full; {self.split_documents:,} documents split, {self.truncated_documents:,} "
            f"truncated by {self.truncated_tokens:,} tokens, {self.dropped_documents:,} dropped "
            f"with {self.dropped_tokens:,} tokens, {self.skipped_samples:,} bad samples skipped"
        )


class Rows:
    """All rows of a run; rows[i] is row i, counted through the epochs.

    A row is a dict of (seq_len,) arrays: tokens, targets (the next token of the same document), positions (from 0 in
    each document), segment_ids (1, 2, ... in a row, 0 for padding), key_start (index of the first position a token may
    look at; seq_len for padding, which sees nothing) and loss_weight (of the target; 0 where there is none).
    """

    def __init__(self, documents: Documents, data: Data, epochs: float | None = None):
        """Cuts the documents to rows.

        Args:
            documents: what the rows hold.
            data: seq_len, packing, truncation, shuffle and seed are used.
            epochs: where the rows end, padding rows being all that follows; None: never.

        Raises:
            UserError: nothing is left.
        """
        self._documents, self._data = documents, data
        lengths = documents.lengths
        pieces = cut_to_rows(lengths, data.seq_len, data.truncation, documents.continuous[documents.chosen])
        # Only a cut can take away all targets, so only then are weights looked at.
        kept = np.ones(len(pieces.document), bool)
        dropped, targets = pieces.dropped.copy(), documents.targets[documents.chosen]
        for piece in np.flatnonzero(pieces.cut[pieces.document]):
            document = pieces.document[piece]
            targets[document] = np.count_nonzero(documents.read(document, 1, data.seq_len + 1)[1])
            kept[piece] = targets[document] > 0
            dropped[document] = not kept[piece]
        if not kept.any():
            why = "the cut leaves no trained token in any of them" if pieces.cut.any() else "all of them are dropped"
            raise UserError(
                f"data: the {len(lengths)} documents are longer than data.seq_len={data.seq_len} tokens, and with "
                f"data.truncation={data.truncation!r} {why}; raise data.seq_len, or choose another data.truncation"
            )
        self._document, self._start, self._length = pieces.document[kept], pieces.start[kept], pieces.length[kept]
        planned = partial(plan, self._length, data.seq_len, data.seed, packing=data.packing, shuffle=data.shuffle)
        self._planned = lru_cache(_PLANS_KEPT)(planned)
        self._first_row = [0]
        self._lock = threading.Lock()
        self.stop = None if epochs is None else self.total(epochs)
        """The number of rows, or None if there is no end."""
        cut = pieces.cut & ~dropped
        self.counts = Counts(
            documents=int(np.count_nonzero(~dropped)),
            tokens=int(self._length.sum()),
            target_tokens=int(targets[~dropped].sum()),
            split_documents=int(np.count_nonzero(np.bincount(self._document) > 1)),
            truncated_documents=int(np.count_nonzero(cut)),
            truncated_tokens=int((lengths[cut] - data.seq_len).sum()),
            dropped_documents=int(np.count_nonzero(dropped)),
            dropped_tokens=int(lengths[dropped].sum()),
            skipped_samples=documents.skipped,
            rows=self.total(1),
            fill=float(self._length.sum() / (self.total(1) * data.seq_len)),
        )

    def total(self, epochs: float) -> int:
        """Rows of so many passes over the data (part of the last one's, for a fraction)."""
        whole = math.floor(epochs)
        first = self._first_row_of(whole)
        if epochs == whole:
            return first
        return first + math.ceil((epochs - whole) * (self._first_row_of(whole + 1) - first))

    def __getitem__(self, index: int) -> Row:
        if self.stop is not None and index >= self.stop:
            return self._build([])
        while self._first_row[-1] <= index:
            self._plan(len(self._first_row) - 1)
        epoch = bisect_right(self._first_row, index) - 1
        epoch_plan = self._plan(epoch)
        row = index - self._first_row[epoch]
        return self._build(epoch_plan.order[epoch_plan.bounds[row] : epoch_plan.bounds[row + 1]])

    def _first_row_of(self, epoch: int) -> int:
        while len(self._first_row) <= epoch:
            self._plan(len(self._first_row) - 1)
        return self._first_row[epoch]

    def _plan(self, epoch: int) -> RowPlan:
        with self._lock:  # threads of the loader come here together at the start of an epoch
            found = self._planned(epoch)
            if len(self._first_row) == epoch + 1:
                self._first_row.append(self._first_row[epoch] + len(found))
            return found

    def _build(self, pieces: np.ndarray | list[int]) -> Row:
        seq_len = self._data.seq_len
        row = {name: np.zeros(seq_len, dtype) for name, dtype in FIELDS.items()}
        begin = 0
        for segment, piece in enumerate(pieces, start=1):
            start, length = self._start[piece], self._length[piece]
            tokens, weights = self._documents.read(self._document[piece], start, start + length + 1)
            end = begin + length
            row["tokens"][begin:end] = tokens[:length]
            row["targets"][begin : begin + len(tokens) - 1] = tokens[1:]
            row["loss_weight"][begin : begin + len(tokens) - 1] = weights[1:]
            row["positions"][begin:end] = np.arange(length)
            row["segment_ids"][begin:end] = segment
            row["key_start"][begin:end] = begin
            begin = end
        row["key_start"][begin:] = seq_len
        return row
