"""Rows: random access to the training data by row number, counted through all epochs.

The work is done in three steps: documents are cut to rows once (`packing.cut_to_rows`), each epoch is planned when its
first row is read (`packing.plan`), and a row is built from the memory-mapped documents when it is read.
"""

import copy
import dataclasses
import math
import threading
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

from jaxtune.columns import ADDED, DESIRABLE, LABEL, MADE, NEXT_TOKEN, OF_IMAGES, OPTION_SHARES, Column
from jaxtune.config.schema import DataOptions
from jaxtune.data.formats.units import Documents
from jaxtune.data.reading.skipped_samples import LITTLE
from jaxtune.data.rows.packing import Patches, Pieces, RowPlan, cut_to_rows, plan
from jaxtune.data.rows.row_images import put_image_tokens, put_patches
from jaxtune.errors import UserError, format_count

Row = dict[str, np.ndarray]

# When one epoch ends and the next begins, the loader's threads read rows of both.
_PLANS_KEPT = 2


@dataclass(frozen=True)
class Counts:
    """The numbers of documents and tokens that the first epoch trains, cuts and drops.

    Attributes:
        documents: documents in the rows.
        tokens: tokens in the rows.
        target_tokens: tokens in the rows that are trained; 0 if documents have labels instead.
        split_documents: long documents that continue in another row.
        truncated_documents: long documents that are cut.
        truncated_tokens: tokens cut off from these documents.
        dropped_documents: documents left out because they do not fit into a row or the cut left no target.
        dropped_tokens: tokens of the dropped documents.
        skipped_samples: bad samples left out under data.on_bad_row='skip'.
        rows: rows of an epoch.
        fill: fraction of the positions that hold a token.
        images: images in the rows.
        patches: patches of these images.
        patch_fill: fraction of the room for patches that holds one.
        dropped_for_patches: dropped documents whose unit has more patches than vision.patches_per_row.
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
    images: int = 0
    patches: int = 0
    patch_fill: float = 0.0
    dropped_for_patches: int = 0

    def __str__(self) -> str:
        trained = f" ({self.target_tokens:,} trained)" if self.target_tokens else ""
        seen = over = ""
        if self.images:
            patches = f"{self.patches:,} patches of {format_count(self.images, 'image')}"
            seen = f" of tokens and {self.patch_fill:.1%} full of {patches}"
        if self.dropped_for_patches:
            over = f" ({self.dropped_for_patches:,} for their patches)"
        return (
            f"{format_count(self.documents, 'document')}, {self.tokens:,} tokens{trained} in "
            f"{format_count(self.rows, 'row')}, {self.fill:.1%} full{seen}; "
            f"{format_count(self.split_documents, 'document')} split, "
            f"{self.truncated_documents:,} truncated by {self.truncated_tokens:,} tokens, "
            f"{self.dropped_documents:,} dropped{over} with {self.dropped_tokens:,} tokens, "
            f"{format_count(self.skipped_samples, 'bad sample')} skipped"
        )


class Rows:
    """All rows of a run; rows[i] is row i, counted through the epochs: a (seq_len,) array for each column, by name."""

    def __init__(
        self,
        documents: Documents,
        data: DataOptions,
        epochs: float | None = None,
        columns: tuple[Column, ...] = NEXT_TOKEN,
        max_documents_per_row: int | None = None,
        rows_per_step: int | None = None,
        name: str = "data",
    ):
        """Cut the documents to rows.

        Args:
            documents: the documents in the rows.
            data: its seq_len, packing, packing_method, group_by_length, truncation, shuffle, shuffle_each and seed.
            epochs: number of passes; all rows after them are padding. None: the rows never end.
            columns: the columns of a row.
            max_documents_per_row: the most documents of a row, if the attention kernel has a bound. None: any number.
            rows_per_step: rows of a step, which data.group_by_length makes similar in length. None: it groups no rows.
            name: name of the documents in the error that no document is left.

        Raises:
            UserError: no document is left; the documents lack a column; a row of the epochs holds more documents than
                `max_documents_per_row`; as `cut_to_rows`. If the rows never end, later epochs raise it when they begin.
        """
        columns = tuple(column for column in columns if column.name not in ADDED)  # `with_column` adds these later
        self._documents, self._data, self._columns = documents, data, columns
        _check_columns(documents, columns)
        lengths = documents.lengths
        labelled, truncation = LABEL in columns or OPTION_SHARES in columns, data.truncation
        if LABEL in columns and truncation == "auto":
            truncation = "right"  # a document that is cut keeps its label
        self._patches_per_row = next((column.length for column in columns if column.per == "patch"), None)
        assert documents.reader is None or self._patches_per_row is not None, "images need the columns of patches"
        images = None if self._patches_per_row is None else Patches(documents.patches, self._patches_per_row)
        pieces = cut_to_rows(lengths, data.seq_len, truncation, documents.continuous, documents.units, images)
        kept, dropped, targets = _drop_untrained(documents, pieces, data.seq_len, labelled)
        if not kept.any():
            if len(documents.units) <= len(lengths):  # answers to a prompt share a row
                raise UserError(f"{name}: {_why_no_unit_is_left(lengths, documents.units, data.seq_len)}")
            may_cut = OPTION_SHARES not in columns and DESIRABLE not in columns  # see the checks of data.truncation
            raise UserError(f"{name}: {_why_none_is_left(lengths, data.seq_len, truncation, may_cut, pieces, images)}")
        self._document, self._start, self._length = pieces.document[kept], pieces.start[kept], pieces.length[kept]
        # Pieces are sorted by parcel: a parcel begins where the number changes.
        opens = np.flatnonzero(np.diff(pieces.parcel[kept], prepend=-1))
        self._parcels = np.append(opens, len(self._length))  # index of each parcel's first piece, and the end
        parcel_lengths = np.add.reduceat(self._length, opens)  # (parcels,)
        planned = partial(
            *(plan, parcel_lengths, data.seq_len, data.seed),
            method=data.packing_method if data.packing else None,
            shuffle=data.shuffle,
            rows_per_step=rows_per_step if data.group_by_length else None,
            groups=documents.part_of[self._document[opens]] if data.shuffle_each else None,
            images=images and images._replace(counts=np.add.reduceat(images.counts[self._document], opens)),
        )
        self._planned = lru_cache(_PLANS_KEPT)(lambda epoch: self._check_bound(planned(epoch), max_documents_per_row))
        # The first row of each planned epoch, and of the epoch after them.
        self._first_row = [0]
        self._lock = threading.Lock()
        self.stop = None if epochs is None else self.total(epochs)
        """The number of rows, or None if they never end."""
        self.counts = self._count(pieces, dropped, int(targets[~dropped].sum()), images)

    @property
    def losses(self) -> list[str]:
        """Lines that warn the user of lost data, each beginning with a number.

        Data is lost if samples are left out of the sources, or if rows are too short: documents that are cut or dropped
        are reported if they are more than a twentieth of the documents or of their tokens.
        """
        counts, seq_len, lines = self.counts, self._data.seq_len, [*self._documents.losses]
        documents = counts.documents + counts.dropped_documents
        tokens = counts.tokens + counts.truncated_tokens + counts.dropped_tokens
        longer_rows = "raise data.seq_len"
        why = f"longer than data.seq_len={seq_len}, or the cut leaves them no trained token"
        remedy = longer_rows
        if over := counts.dropped_for_patches:
            most = f"vision.patches_per_row={self._patches_per_row}"
            why = f"{why}, or have more than {most} patches ({over:,} of them)"
            remedy = f"{longer_rows} or vision.patches_per_row, or lower vision.max_pixels"
        for lost, lost_tokens, fate, advice in (
            (counts.dropped_documents, counts.dropped_tokens, f"left out: they are {why}", remedy),
            (counts.truncated_documents, counts.truncated_tokens, f"cut to data.seq_len={seq_len}", longer_rows),
        ):
            if max(lost / documents, lost_tokens / tokens) > LITTLE:
                share = f"{lost_tokens:,} of {tokens:,} tokens are lost ({lost_tokens / tokens:.0%})"
                lines.append(f"{lost:,} of {documents:,} documents are {fate}; {share}; {advice}")
        return lines

    @property
    def documents(self) -> Documents:
        """The documents in the rows."""
        return self._documents

    def total(self, epochs: float) -> int:
        """Return the number of rows of `epochs` passes over the data; the last pass may be a fraction."""
        whole = math.floor(epochs)
        first = self._first_row_of(whole)
        if epochs == whole:
            return first
        return first + math.ceil((epochs - whole) * (self._first_row_of(whole + 1) - first))

    def epoch(self, position: dict[str, Any]) -> float:
        """Return the number of passes over the data up to a position."""
        row = position.get("row", 0)
        return (row if self.stop is None else min(row, self.stop)) / self.counts.rows  # the last step may be padded

    def since(self, position: dict[str, Any]) -> "Rows":
        """Return the rows themselves: they can be read from any position."""
        return self

    def position(self, row: int) -> dict[str, Any]:
        """Return the position at which `row` is the next row, as JSON."""
        return {"row": row}

    def __getitem__(self, index: int) -> Row:
        return self._build(self._parcels_in(index))

    def _parcels_in(self, index: int) -> np.ndarray | list[int]:
        """Return the parcels in row `index`; none after the last row, so that it is padding."""
        if self.stop is not None and index >= self.stop:
            return []
        # Epochs may differ in their number of rows, so the first row of an epoch is known only when all before it are
        # planned. A run that continues plans these epochs again.
        while self._first_row[-1] <= index:
            self._plan(len(self._first_row) - 1)
        epoch = bisect_right(self._first_row, index) - 1
        epoch_plan = self._plan(epoch)
        row = index - self._first_row[epoch]
        return epoch_plan.order[epoch_plan.bounds[row] : epoch_plan.bounds[row + 1]]

    def documents_in(self, index: int) -> list[int]:
        """Return the number of the document of each piece in row `index`, in order of position."""
        parcels = self._parcels_in(index)
        return [int(n) for p in parcels for n in self._document[self._parcels[p] : self._parcels[p + 1]]]

    def targets_in(self, index: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield the targets of each piece in row `index`, in order of position.

        Yields:
            (document, index in it of the first target, position in the row that predicts it, number of targets)
        """
        for piece, begin, _ in self._place_pieces(self._parcels_in(index)):
            document, start = int(self._document[piece]), int(self._start[piece])
            count = min(int(self._length[piece]), int(self._documents.lengths[document]) - start - 1)
            yield document, start + 1, int(begin), count

    def with_column(self, column: Column, values: np.ndarray) -> "Rows":
        """Return the same rows with another column; `values` as in `Documents.with_column`."""
        # A shallow copy shares the plans of the epochs, which do not depend on columns.
        other = copy.copy(self)
        other._documents, other._columns = self._documents.with_column(column, values), (*self._columns, column)
        return other

    def _count(
        self, pieces: Pieces, dropped: Bool[np.ndarray, " documents"], target_tokens: int, images: Patches | None
    ) -> Counts:
        """Count what the first epoch trains, cuts and drops."""
        documents, seq_len, rows = self._documents, self._data.seq_len, self.total(1)
        lengths, cut = documents.lengths, pieces.cut & ~dropped
        counts = Counts(
            documents=int(np.count_nonzero(~dropped)),
            tokens=int(self._length.sum()),
            target_tokens=target_tokens,
            split_documents=int(np.count_nonzero(np.bincount(self._document) > 1)),
            truncated_documents=int(np.count_nonzero(cut)),
            truncated_tokens=int((lengths[cut] - seq_len).sum()),
            dropped_documents=int(np.count_nonzero(dropped)),
            dropped_tokens=int(lengths[dropped].sum()),
            skipped_samples=documents.skipped_samples,
            rows=rows,
            fill=float(self._length.sum() / (rows * seq_len)),
        )
        if images is None:
            return counts
        seen = ~dropped & (images.counts > 0)
        patches = int(images.counts[seen].sum())
        of_unit = np.repeat(np.add.reduceat(images.counts, documents.units[:-1]), np.diff(documents.units))
        return dataclasses.replace(
            counts,
            images=int(documents.image_counts[seen].sum()),
            patches=patches,
            patch_fill=patches / (rows * images.per_row),
            dropped_for_patches=int(np.count_nonzero(of_unit > images.per_row)),
        )

    def _first_row_of(self, epoch: int) -> int:
        while len(self._first_row) <= epoch:
            self._plan(len(self._first_row) - 1)
        return self._first_row[epoch]

    def _plan(self, epoch: int) -> RowPlan:
        with self._lock:  # several loader threads arrive here together at the start of an epoch
            row_plan = self._planned(epoch)
            if len(self._first_row) == epoch + 1:
                self._first_row.append(self._first_row[epoch] + len(row_plan))
            return row_plan

    def _check_bound(self, row_plan: RowPlan, most: int | None) -> RowPlan:
        """Return the plan. Raises UserError if one of its rows holds more than `most` documents."""
        if most is not None:
            # Pieces before each parcel in the order of the plan; at the bounds of rows, the differences are the pieces
            # of a row.
            pieces = np.append(0, np.cumsum(np.diff(self._parcels)[row_plan.order]))
            fullest = int(np.diff(pieces[row_plan.bounds]).max())
            if fullest > most:
                raise UserError(
                    f"attention.documents_per_row={most}: a row of the data holds {fullest} documents, or parts of "
                    f"them; set it to {fullest}, or take another attention.backend, which has no bound"
                )
        return row_plan

    def _build(self, parcels: np.ndarray | list[int]) -> Row:
        seq_len = self._data.seq_len
        # Positions that no piece fills keep the padding value.
        row = {
            column.name: np.full(
                column.shape(seq_len), seq_len if column.padding == "seq_len" else column.padding, column.dtype
            )
            for column in self._columns
        }
        patch = 0  # the first patch of the next document
        # From 1, because segment 0 is padding.
        for segment, (piece, begin, unit) in enumerate(self._place_pieces(parcels), start=1):
            self._put(row, piece, begin, segment, unit)
            if self._patches_per_row is not None:
                patch = self._put_images(row, piece, begin, patch)
        return row

    def _place_pieces(self, parcels: np.ndarray | list[int]) -> Iterator[tuple[int, int, int]]:
        """Yield (piece, its first position, number of its unit in the row from 1) for each piece of a row."""
        begin = 0
        for unit, parcel in enumerate(parcels, start=1):
            for piece in range(self._parcels[parcel], self._parcels[parcel + 1]):
                yield piece, begin, unit
                begin += self._length[piece]

    def _put(self, row: Row, piece: int, begin: int, segment: int, unit: int) -> None:
        """Write a piece into a row, beginning at position `begin`."""
        document, start, length = self._document[piece], self._start[piece], self._length[piece]
        stop = start + length + 1  # the target of the last token may be in the next piece
        tokens = self._documents.values("tokens", document, start, stop)
        # The last piece of a document has one token fewer to predict: its last position has no target.
        whole, predicting = slice(begin, begin + length), slice(begin, begin + len(tokens) - 1)
        for column in self._columns:
            match column.name:
                case name if name in OF_IMAGES:
                    pass  # `_put_images` writes them
                case "tokens":
                    row["tokens"][whole] = tokens[:length]
                case "targets":
                    row["targets"][predicting] = tokens[1:]
                case "positions":
                    # Rotary positions begin at 0 in each piece, also in one that continues a document.
                    row["positions"][whole] = np.arange(length)
                case "segment_ids":
                    row["segment_ids"][whole] = segment
                case "unit_ids":
                    row["unit_ids"][whole] = unit
                case "key_start":
                    # The first key that a query sees: no document attends to another.
                    row["key_start"][whole] = begin
                case "last":
                    row["last"][begin + length - 1] = True
                case "further_targets" | "further_loss_weight":
                    values = column.name.removeprefix("further_").replace("targets", "tokens")
                    for module in range(column.width or 0):
                        # As for targets, values may be in the next piece, but never in another document.
                        first = start + module + 2
                        found = self._documents.values(values, document, first, first + length)
                        row[column.name][begin : begin + len(found), module] = found
                case name:
                    # Values of tokens are shifted by one: each is at the position that predicts its token.
                    at = predicting if column.per == "token" else whole
                    row[name][at] = self._documents.values(name, document, start + 1, stop)

    def _put_images(self, row: Row, piece: int, begin: int, patch: int) -> int:
        """Write what a piece's images put into a row; `patch`: the first patch. Return the patch after the last."""
        document, start = int(self._document[piece]), int(self._start[piece])
        tokens = self._documents.values("tokens", document, start, start + int(self._length[piece]))
        # A document with images is never split, so all its images belong to the piece.
        images, reader = self._documents.images(document), self._documents.reader
        try:
            put_image_tokens(row, begin, tokens, images, patch, self._documents.layout)
            if reader is not None:
                put_patches(row, images, patch, reader)
        except UserError as error:
            raise UserError(f"{self._documents.where(document)}: {error}") from error
        return patch + sum(image.patches for image in images)


def _why_none_is_left(
    lengths: Int[np.ndarray, " documents"],
    seq_len: int,
    truncation: str,
    may_cut: bool,
    pieces: Pieces,
    images: Patches | None,
) -> str:
    """Say why no document is left for the rows, and what to change; may_cut: whether data.truncation may cut any."""
    if images is not None and (images.counts > images.per_row).any():
        return (
            f"no document fits into a row of data.seq_len={seq_len} tokens and vision.patches_per_row="
            f"{images.per_row} patches; the images of a document have up to {images.counts.max():,} patches; raise "
            "vision.patches_per_row, or lower vision.max_pixels"
        )
    why = "the cut leaves no trained token" if pieces.cut.any() else "all are dropped"
    longer = "the document is" if len(lengths) == 1 else f"all {len(lengths):,} documents are"
    return (
        f"{longer} longer than data.seq_len={seq_len} tokens, and with data.truncation={truncation!r} {why}; "
        f"raise data.seq_len{', or choose another data.truncation' if may_cut else ', because none may be cut'}"
    )


def _why_no_unit_is_left(
    lengths: Int[np.ndarray, " documents"], units: Int[np.ndarray, " units+1"], seq_len: int
) -> str:
    """Say why no unit of several documents is left, and what to change: these are never cut."""
    tokens = np.add.reduceat(lengths, units[:-1])
    return (
        f"no sample fits into a row of data.seq_len={seq_len} tokens: its answers, each with the prompt, share a row "
        f"and are never cut. The shortest sample has {tokens.min():,} tokens and the longest {tokens.max():,}; raise "
        "data.seq_len"
    )


def _drop_untrained(
    documents: Documents, pieces: Pieces, seq_len: int, labelled: bool
) -> tuple[Bool[np.ndarray, " pieces"], Bool[np.ndarray, " documents"], Int[np.ndarray, " documents"]]:
    """Return the pieces to keep, the documents that are dropped, and the number of targets of each document."""
    kept = np.ones(len(pieces.document), bool)
    dropped, targets = pieces.dropped.copy(), documents.targets.copy()
    # Only a cut can remove all targets of a document, so only the weights of cut documents are read and counted.
    for piece in () if labelled else np.flatnonzero(pieces.cut[pieces.document]):
        document = pieces.document[piece]
        # A piece's targets are its tokens shifted by one: nothing predicts its first token.
        start = pieces.start[piece] + 1
        targets[document] = np.count_nonzero(documents.values("loss_weight", document, start, start + seq_len))
        kept[piece] = targets[document] > 0
        dropped[document] = not kept[piece]
    return kept, dropped, targets


def _check_columns(documents: Documents, columns: tuple[Column, ...]) -> None:
    """Raise UserError unless the documents of every entry have the columns that a row cannot compute."""
    for column in columns:
        for part in documents.parts if column.name not in MADE else ():
            if column.name not in part.columns or part.columns[column.name].per != column.per:
                raise UserError(
                    f"data: {part.name} has no column {column.name!r} with a value for each {column.per}, which the "
                    "objective reads"
                )
