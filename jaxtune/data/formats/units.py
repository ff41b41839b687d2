"""Units: one document, or several that are packed into the same row. The data of a run is a sequence of units."""

import dataclasses
import hashlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from jaxtyping import Bool, Float16, Int32, Int64, UInt8

from jaxtune.columns import Column
from jaxtune.data.chat.encoding import Encoded
from jaxtune.data.images.image_reader import ImageReader
from jaxtune.image_layout import ImageLayout, ImageRef


@dataclass(frozen=True)
class Unit:
    """One document, or several that must be in the same row, such as a chosen and a rejected answer.

    Attributes:
        documents: the documents, in their order in a row.
        continuous: whether the unit is running text, which may be cut anywhere, not an answer or a dialogue.
        values: values of the columns other than tokens and weights, by name: an array for each document (per token), a
            value for each document, or one value (per unit).
        where: the file and line, or row, of the unit's sample; "" if not known.
    """

    documents: tuple[Encoded, ...]
    continuous: bool = False
    values: Mapping[str, Any] = field(default_factory=dict)
    where: str = ""


@dataclass(frozen=True)
class StoredImages:
    """The images of the documents of one dataset entry, one document after the other.

    Attributes:
        first: number of the first image of each document, and at the end the number of images.
        grids: rows and columns of patches of each image.
        places: the places of all images, in UTF-8.
        place_ends: end of each image's place in `places`.
    """

    first: Int64[np.ndarray, "documents+1"]
    grids: Int32[np.ndarray, "images 2"]
    places: UInt8[np.ndarray, "bytes"]
    place_ends: Int64[np.ndarray, "images"]

    def __getitem__(self, document: int) -> tuple[ImageRef, ...]:
        """Return the images of a document."""
        images = []
        for image in range(*self.first[document : document + 2]):
            start = self.place_ends[image - 1] if image else 0
            place = bytes(self.places[start : self.place_ends[image]]).decode()
            rows, columns = self.grids[image].tolist()
            images.append(ImageRef(place, (rows, columns)))
        return tuple(images)

    @property
    def patches(self) -> Int64[np.ndarray, "documents"]:
        """Number of patches of each document."""
        ends = np.append(0, np.cumsum(np.prod(self.grids, axis=1, dtype=np.int64)))
        return np.diff(ends[self.first])


@dataclass(frozen=True)
class TokenisedDataset:
    """The tokenised documents of one dataset entry.

    Attributes:
        name: the entry's path.
        key: a hash of the stored data: entries with the same key have the same data, wherever it came from.
        columns: the stored columns by name: at least `tokens` and `loss_weight`, the weight of predicting each token.
        values: the values of each column, all documents one after the other: (tokens,), (documents,) or (units,), with
            a last axis if the column has a width.
        offsets: index of the first token of each document, and at the end the number of tokens.
        units: index of the first document of each unit, and at the end the number of documents.
        targets: number of trained tokens of each document (the first token of a document is never predicted).
        continuous: whether each document is running text.
        skipped: number of samples left out under data.on_bad_row='skip'.
        notes: lines for the user: the data that was read, and its type.
        losses: lines that warn the user of data that is left out, each beginning with a number.
        places: file and line, or row, of the first units.
        images: the images of the documents; None: no document has images.
    """

    name: str
    key: str
    columns: Mapping[str, Column]
    values: Mapping[str, np.ndarray]
    offsets: Int64[np.ndarray, "documents+1"]
    units: Int64[np.ndarray, "units+1"]
    targets: Int64[np.ndarray, "documents"]
    continuous: Bool[np.ndarray, "documents"]
    skipped: int
    notes: tuple[str, ...]
    losses: tuple[str, ...] = ()
    places: tuple[str, ...] = ()
    images: StoredImages | None = None


@dataclass(frozen=True)
class Documents:
    """Tokenised documents of all entries, in units that are never divided.

    Documents are numbered from 0, in the order of their units.

    Attributes:
        parts: the documents of each entry.
        chosen: numbers of the units in use, counted through all parts: all, one side of `hold_out`, or a mixture.
        reader: reads the patches of the documents' images; None: the model sees no images.
    """

    parts: tuple[TokenisedDataset, ...]
    chosen: Int64[np.ndarray, "units"]
    reader: ImageReader | None = None

    @classmethod
    def concatenate(cls, parts: Iterable[TokenisedDataset], reader: ImageReader | None = None) -> "Documents":
        """Return all documents of the parts, one part after the other."""
        parts = tuple(parts)
        return cls(parts, np.arange(sum(len(part.units) - 1 for part in parts)), reader)

    def __len__(self) -> int:
        return len(self._numbers)

    @property
    def key(self) -> str:
        """A hash of all tokens and weights, chosen or not: runs with the same key have the same data."""
        keys = [part.key for part in self.parts]
        return keys[0] if len(keys) == 1 else hashlib.sha256("".join(keys).encode()).hexdigest()

    def has_key(self, key: str) -> bool:
        """Whether `key` is this data's `key`, or its key in older versions (one cache folder for all entries)."""
        return key == self.key or (len(self.parts) > 1 and key == self._key_of_one_folder())

    def _key_of_one_folder(self) -> str:
        content = hashlib.sha256()
        for part in self.parts:
            for start, stop in pairwise(part.offsets):
                content.update(part.values["tokens"][start:stop].data)  # the array's bytes, without a copy
                content.update(part.values["loss_weight"][start:stop].data)
        content.update(np.concatenate([np.diff(part.offsets) for part in self.parts]).tobytes())
        return content.hexdigest()

    @property
    def skipped_samples(self) -> int:
        """Samples left out under data.on_bad_row='skip'."""
        return sum(part.skipped for part in self.parts)

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines for the user: the data that was read, and its type."""
        return tuple(note for part in self.parts for note in part.notes)

    @property
    def losses(self) -> tuple[str, ...]:
        """Lines that warn the user of samples left out of the sources."""
        return tuple(loss for part in self.parts for loss in part.losses)

    @cached_property
    def units(self) -> Int64[np.ndarray, "units+1"]:
        """Number of the first document of each unit, and the number of documents."""
        sizes = np.concatenate([np.diff(part.units) for part in self.parts])[self.chosen]  # documents of each unit
        return np.concatenate([[0], np.cumsum(sizes)])  # (units + 1,)

    @cached_property
    def lengths(self) -> Int64[np.ndarray, "documents"]:
        """Number of tokens of each document."""
        return np.concatenate([np.diff(part.offsets) for part in self.parts])[self._numbers]

    @cached_property
    def targets(self) -> Int64[np.ndarray, "documents"]:
        """Number of trained tokens of each document."""
        return np.concatenate([part.targets for part in self.parts])[self._numbers]

    @cached_property
    def continuous(self) -> Bool[np.ndarray, "documents"]:
        """Whether each document is running text, which may be cut anywhere."""
        return np.concatenate([part.continuous for part in self.parts])[self._numbers]

    @property
    def layout(self) -> ImageLayout | None:
        """The layout of images; None: the model sees no images."""
        return None if self.reader is None else self.reader.layout

    def images(self, i: int) -> tuple[ImageRef, ...]:
        """Return the images of document i, in the order of their tokens."""
        part, document = self._locate(i)
        return () if part.images is None else part.images[document]

    @cached_property
    def image_counts(self) -> Int64[np.ndarray, "documents"]:
        """Number of images of each document."""
        return self._of_images(lambda images: np.diff(images.first))

    @cached_property
    def patches(self) -> Int64[np.ndarray, "documents"]:
        """Number of patches of the images of each document."""
        return self._of_images(lambda images: images.patches)

    def _of_images(self, count: Callable[[StoredImages], np.ndarray]) -> Int64[np.ndarray, "documents"]:
        """Return a number for each document; 0 if its entry has no images."""
        none = (np.zeros(len(part.targets), np.int64) for part in self.parts)
        counts = [zeros if part.images is None else count(part.images) for part, zeros in zip(self.parts, none)]
        return np.concatenate(counts)[self._numbers]

    @cached_property
    def part_of(self) -> Int64[np.ndarray, "documents"]:
        """Number of each document's part."""
        return np.searchsorted(self._first, self._numbers, "right") - 1  # the last part that begins at or before it

    def with_column(self, column: Column, values: np.ndarray) -> "Documents":
        """Return the same documents with another column.

        Args:
            column: the column, per document or per token.
            values: a value for each document. For a column per token, a value for each token of all parts, chosen or
                not (`first_token`): the array is sliced, not indexed, so that a memory-mapped file is not read here.
        """
        if column.per == "token":
            ends = np.cumsum([0, *(part.offsets[-1] for part in self.parts)])
        else:
            every_value = np.zeros(sum(part.units[-1] for part in self.parts), column.dtype)
            every_value[self._numbers] = values
            values, ends = every_value, np.array([*self._first, len(every_value)])
        parts = tuple(
            dataclasses.replace(
                part,
                columns={**part.columns, column.name: column},
                values={**part.values, column.name: values[first:end]},
            )
            for part, (first, end) in zip(self.parts, pairwise(ends))
        )
        return dataclasses.replace(self, parts=parts)

    @cached_property
    def first_token(self) -> Int64[np.ndarray, "documents"]:
        """Number of the first token of each document, counted through all tokens of the parts, chosen or not."""
        lengths = np.concatenate([np.diff(part.offsets) for part in self.parts])
        return (np.cumsum(lengths) - lengths)[self._numbers]  # the sum of the lengths before

    def read(self, i: int, start: int, stop: int) -> tuple[Int32[np.ndarray, "n"], Float16[np.ndarray, "n"]]:
        """Return tokens [start, stop) of document i, up to its end, and the weight of predicting each."""
        return self.values("tokens", i, start, stop), self.values("loss_weight", i, start, stop)

    def where(self, i: int) -> str:
        """Return the file and line, or row, of document i. Only the first units have it; else the entry's path."""
        part, document = self._locate(i)
        unit = int(np.searchsorted(part.units, document, "right")) - 1
        return (part.places[unit] if unit < len(part.places) else "") or part.name

    def values(self, column: str, i: int, start: int, stop: int) -> np.ndarray:
        """Return a stored column's values for tokens [start, stop) of document i; a scalar if per document or unit."""
        part, document = self._locate(i)
        per = part.columns[column].per
        if per == "token":
            begin = part.offsets[document]
            return part.values[column][begin + start : min(begin + stop, part.offsets[document + 1])]
        unit = np.searchsorted(part.units, document, "right") - 1
        return part.values[column][document if per == "document" else unit]

    def _locate(self, i: int) -> tuple[TokenisedDataset, int]:
        """Return the part of document i, and the document's number in the part."""
        number = self._numbers[i]
        part = bisect_right(self._first, number) - 1
        return self.parts[part], number - self._first[part]

    @cached_property
    def _numbers(self) -> Int64[np.ndarray, "documents"]:
        """Numbers of the documents of the chosen units, counted through the parts."""
        ends = np.cumsum(np.concatenate([np.diff(part.units) for part in self.parts]))
        sizes = np.diff(self.units)
        # Documents of a unit have consecutive numbers: shift each unit's run to its place in the parts.
        return np.arange(self.units[-1]) + np.repeat(ends[self.chosen] - sizes - self.units[:-1], sizes)

    @cached_property
    def _first(self) -> list[int]:
        """Number of the first document of each part, counted through the parts."""
        return np.cumsum([0, *(part.units[-1] for part in self.parts[:-1])]).tolist()
