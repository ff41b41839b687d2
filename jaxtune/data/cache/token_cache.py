"""A cache folder: the tokenised documents of one dataset entry, in files that are mapped into memory.

tokens.bin, loss_weight.bin, NAME.bin  the values of each column, all documents one after the other
offsets.npy, units.npy, targets.npy, continuous.npy  the arrays of `TokenisedDataset`
summary.json  the key, the columns, and the notes for the user
images.first.npy, images.grids.npy, images.places.npy, images.place_ends.npy  the arrays of `StoredImages`, if documents
    have images: where they are and their sizes, never their pixels
a manifest with checksums of all files (`checkpoint.manifest`), written last
"""

import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from jaxtune.checkpoint import manifest
from jaxtune.columns import Column
from jaxtune.data.chat.encoding import Encoded
from jaxtune.data.formats.units import StoredImages, TokenisedDataset, Unit
from jaxtune.image_layout import ImageRef

FORMAT = 6
"""Version of the files' layout and of the tokens made from the same samples; folders of other versions are not read."""

SUMMARY = "summary.json"
"""The file with the key, the columns, and the notes for the user."""

CONTENT = ("format", "key", "columns", "documents", "tokens", "places")
"""The fields of the summary that describe the content: numbers of documents and tokens, a hash of all values, ..."""

_PLACES = 100  # the first units keep their places, for samples that are shown to the user

# Weights have two bytes; 0, 1 and factors such as 0.5 and 2 are exact in them.
_TOKENS, _LOSS_WEIGHT = Column("tokens", np.int32), Column("loss_weight", np.float16)


def write(folder: Path, units: Iterable[Unit], columns: tuple[Column, ...] = ()) -> dict[str, Any]:
    """Write units into a new folder, one by one. `load` can read the folder after `finish`.

    Args:
        folder: an empty folder.
        units: the units; each has at least one document.
        columns: the columns in the units' `values`.

    Returns:
        The fields of the summary that describe the content: format, key, columns, numbers of documents and tokens,
        places of the first units.
    """
    content = hashlib.sha256()
    # Arrays of one number for each document fit in memory; the tokens go to the files as they come.
    lengths, sizes, targets, continuous = array("q"), array("q"), array("q"), bytearray()
    places: list[str] = []
    images = _ImageArrays()
    with ExitStack() as opened:
        stored = (_TOKENS, _LOSS_WEIGHT, *columns)
        files = {column: opened.enter_context((folder / f"{column.name}.bin").open("wb")) for column in stored}

        def put(column: Column, values: Any) -> None:
            array = np.ascontiguousarray(values, column.dtype)
            files[column].write(array.data)  # not array.tofile, whose error does not tell that the disk is full
            content.update(array.data)

        for unit in units:
            for document in unit.documents:
                put(_TOKENS, document.tokens)
                put(_LOSS_WEIGHT, document.loss_weights)
                lengths.append(len(document.tokens))
                # Nothing predicts the first token, whatever its weight.
                targets.append(int(np.count_nonzero(document.loss_weights[1:])))
                continuous.append(unit.continuous)
                images.add(document.images)
            sizes.append(len(unit.documents))
            places += [unit.where] if len(places) < _PLACES else []
            counts = {"token": sum(lengths[-sizes[-1] :]), "document": sizes[-1], "unit": 1}
            for column in columns:
                values = unit.values[column.name]
                values = np.concatenate(values) if column.per == "token" else np.reshape(values, column.shape(-1))
                if len(values) != counts[column.per]:
                    raise ValueError(f"{column.name}: {len(values)} values for {counts[column.per]} of {column.per}")
                put(column, values)
    # Without the lengths, the same tokens divided into other documents would have the same key.
    content.update(np.array(lengths, np.int64).tobytes())
    # If each unit is one document, the key is the same as in checkpoints from before there were units.
    if len(sizes) < len(lengths):
        content.update(np.array(sizes, np.int64).tobytes())
    if (stored_images := images.to_arrays()) is not None:
        for name, values in vars(stored_images).items():
            np.save(folder / f"images.{name}.npy", values)
            if name in ("first", "grids"):  # places change when the files are moved
                content.update(np.ascontiguousarray(values).data)
    np.save(folder / "offsets.npy", np.append(0, np.cumsum(lengths, dtype=np.int64)))  # (documents + 1,)
    np.save(folder / "units.npy", np.append(0, np.cumsum(sizes, dtype=np.int64)))  # (units + 1,)
    np.save(folder / "targets.npy", np.array(targets, np.int64))  # (documents,)
    np.save(folder / "continuous.npy", np.frombuffer(continuous, bool))  # (documents,)
    declared = [
        [column.name, np.dtype(column.dtype).name, column.per, *([column.width] if column.width else [])]
        for column in stored
    ]
    key, documents, tokens = content.hexdigest(), len(lengths), sum(lengths)
    return dict(zip(CONTENT, (FORMAT, key, declared, documents, tokens, places), strict=True))


def finish(
    folder: Path,
    summary: dict[str, Any],
    name: str,
    skipped: int = 0,
    notes: Iterable[str] = (),
    losses: Iterable[str] = (),
) -> None:
    """Write the summary of a folder (the result of `write`, and the rest of `TokenisedDataset`), then the checksums."""
    rest = {"name": name, "skipped": skipped, "notes": list(notes), "losses": list(losses)}
    (folder / SUMMARY).write_text(json.dumps(summary | rest))
    manifest.write(folder)


def read_summary(folder: Path) -> dict[str, Any]:
    """Return the summary of a folder that may be damaged; {} if it cannot be read."""
    try:
        summary = json.loads((folder / SUMMARY).read_text())
    except (OSError, ValueError):
        return {}
    return summary if isinstance(summary, dict) else {}


def load(folder: Path) -> TokenisedDataset:
    """Map the documents of a folder into memory. Its files must agree with its manifest."""
    summary = json.loads((folder / SUMMARY).read_text())
    with contextlib.suppress(OSError):  # the cache may belong to another user
        os.utime(folder / SUMMARY)  # records the last use, for jaxtune.cache
    arrays = {name: np.load(folder / f"{name}.npy") for name in ("offsets", "units", "targets", "continuous")}
    columns = {
        name: Column(name, np.dtype(dtype).type, per, width=width[0] if width else None)
        for name, dtype, per, *width in summary["columns"]
    }
    values = {}
    for name, column in columns.items():
        file = folder / f"{name}.bin"
        empty = np.zeros(0, column.dtype)  # an empty file cannot be mapped
        stored = np.memmap(file, column.dtype, mode="r") if file.stat().st_size else empty
        values[name] = stored.reshape(column.shape(-1)) if column.width else stored
    name, key, skipped, notes, losses = (summary[field] for field in ("name", "key", "skipped", "notes", "losses"))
    return TokenisedDataset(
        name,
        key,
        columns,
        values,
        **arrays,
        skipped=skipped,
        notes=tuple(notes),
        losses=tuple(losses),
        places=tuple(summary["places"]),
        images=_load_images(folder),
    )


class _ImageArrays:
    """The images of documents, collected while they are written: some 30 bytes and a place each."""

    def __init__(self):
        self._counts, self._grids, self._ends, self._places = array("q"), array("i"), array("q"), bytearray()

    def add(self, images: tuple[ImageRef, ...]) -> None:
        """Add the images of the next document."""
        self._counts.append(len(images))
        for image in images:
            self._grids.extend(image.grid)
            self._places += image.place.encode()
            self._ends.append(len(self._places))

    def to_arrays(self) -> StoredImages | None:
        """Return the arrays; None if no document has an image."""
        if not self._ends:
            return None
        return StoredImages(
            np.append(0, np.cumsum(self._counts, dtype=np.int64)),
            np.array(self._grids, np.int32).reshape(-1, 2),
            np.frombuffer(self._places, np.uint8),
            np.array(self._ends, np.int64),
        )


def store_images(documents: Iterable[tuple[ImageRef, ...]]) -> StoredImages | None:
    """Return the images of each document as arrays; None if no document has an image."""
    arrays = _ImageArrays()
    for images in documents:
        arrays.add(images)
    return arrays.to_arrays()


def _load_images(folder: Path) -> StoredImages | None:
    if not (folder / "images.first.npy").exists():
        return None
    fields = [field.name for field in dataclasses.fields(StoredImages)]
    return StoredImages(*(np.load(folder / f"images.{name}.npy", mmap_mode="r") for name in fields))


def gather_units(units: Sequence[Unit], name: str, columns: tuple[Column, ...] = ()) -> TokenisedDataset:
    """Return units as a part in memory, without a folder."""
    documents = [document for unit in units for document in unit.documents]
    values: dict[str, list[Any]] = {
        _TOKENS.name: [document.tokens for document in documents],
        _LOSS_WEIGHT.name: [document.loss_weights for document in documents],
    }
    for column in columns:
        stored = [unit.values[column.name] for unit in units]
        values[column.name] = (
            list(itertools.chain(*stored))
            if column.per == "token"
            else [np.reshape(x, column.shape(-1)) for x in stored]
        )
    every = {column.name: column for column in (_TOKENS, _LOSS_WEIGHT, *columns)}
    return TokenisedDataset(
        name,
        # Not compared with anything: a stream has a key of its own.
        key="",
        columns=every,
        values={name: np.concatenate(arrays).astype(every[name].dtype) for name, arrays in values.items()},
        offsets=np.cumsum([0, *(len(document.tokens) for document in documents)]),
        units=np.cumsum([0, *(len(unit.documents) for unit in units)]),
        targets=np.array([np.count_nonzero(document.loss_weights[1:]) for document in documents]),
        continuous=np.array([unit.continuous for unit in units for _ in unit.documents], bool),
        skipped=0,
        notes=(),
        places=tuple(unit.where for unit in units[:_PLACES]),
        images=store_images(document.images for document in documents),
    )


def units_of(part: TokenisedDataset) -> Iterator[Unit]:
    """Yield the units of a part as they were written."""
    columns = [column for name, column in part.columns.items() if name not in (_TOKENS.name, _LOSS_WEIGHT.name)]
    for unit, (first, last) in enumerate(pairwise(part.units.tolist())):
        bounds = [slice(*span) for span in pairwise(part.offsets[first : last + 1].tolist())]
        images = [() if part.images is None else part.images[document] for document in range(first, last)]
        documents = tuple(
            Encoded(part.values["tokens"][at], part.values["loss_weight"][at], images=of)
            for at, of in zip(bounds, images)
        )
        values = {}
        for column in columns:
            stored = part.values[column.name]
            match column.per:
                case "token":
                    values[column.name] = [stored[at] for at in bounds]
                case "document":
                    values[column.name] = stored[first:last]
                case "unit":
                    values[column.name] = stored[unit]
        where = part.places[unit] if unit < len(part.places) else ""
        yield Unit(documents, bool(part.continuous[first]), values, where)
