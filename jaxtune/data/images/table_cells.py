"""Images inside tables, found again by file, row and column: Parquet, Arrow, or a dataset passed from Python."""

import json
import os
import threading
from bisect import bisect_right
from collections.abc import Mapping
from functools import lru_cache
from itertools import accumulate
from typing import Any, Literal, NamedTuple

import fsspec

from jaxtune.config.sources import in_memory
from jaxtune.errors import UserError, hide_secrets

_FILES, _ROW_GROUPS = 16, 4  # open files, and row groups of images in memory, of a process

_lock = threading.Lock()


TableFormat = Literal["parquet", "arrow", "python"]


class Cell(NamedTuple):
    """The place of an image in a table.

    Attributes:
        location: path or URL of the file, or the name of a dataset passed from Python.
        row: number of the row, from 0.
        column: the column, whose values are {"bytes", "path"}, or lists of such objects.
        index: number of the image in the list; None: the value is not a list.
        format: the format of the file; python: it is a dataset passed from Python.
    """

    location: str
    row: int
    column: str
    index: int | None
    format: TableFormat

    def __str__(self) -> str:
        number = "" if self.index is None else f" image {self.index}"
        return f"{self.location} row {self.row} column {self.column!r}{number}"


def place_images(sample: Mapping[str, Any], location: str, row: int, form: TableFormat) -> Mapping[str, Any]:
    """Return a row of a table in which each image, {"bytes", "path"}, has its place too, under "place".

    An image in a nested column or in a remote Arrow file gets none, because it is not read from there again.
    """
    changed = {}
    if form == "arrow" and "://" in location:
        return sample
    if form != "python" and "://" not in location:
        location = os.path.abspath(location)
    for column, value in sample.items():
        if _is_image(value):
            changed[column] = _with_place(value, Cell(location, row, column, None, form))
        elif isinstance(value, list) and any(map(_is_image, value)):
            cells = (Cell(location, row, column, i, form) for i in range(len(value)))
            changed[column] = [_with_place(one, cell) if _is_image(one) else one for one, cell in zip(value, cells)]
    return {**sample, **changed} if changed else sample


def _is_image(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("bytes"), bytes)


def _with_place(image: dict[str, Any], cell: Cell) -> dict[str, Any]:
    if hide_secrets(cell.location) != cell.location:
        return image  # places are written to the cache
    return image | {"place": json.dumps(cell)}


def parse_cell(place: str) -> Cell | None:
    """Return the cell that a place names; None: it is a path or a URL."""
    return Cell(*json.loads(place)) if place.startswith("[") else None


def read_cell(cell: Cell) -> bytes:
    """Return the bytes of an image.

    Raises:
        UserError: the table has no such image.
    """
    try:
        value = _value(cell)
        value = value if cell.index is None else value[cell.index]
        if isinstance(value["bytes"], bytes):
            return value["bytes"]
    except (LookupError, TypeError, ValueError, OSError) as error:
        raise UserError(f"{cell}: cannot be read: {error}; the file has changed since it was prepared") from error
    raise UserError(f"{cell}: is no longer an image; the file has changed since it was prepared")


def _value(cell: Cell) -> Any:
    if cell.format == "python":
        return in_memory.find(cell.location)[cell.row][cell.column]
    # One thread reads a file at a time, so that a row group is read once. Decoding takes much longer.
    with _lock:
        if cell.format == "arrow":
            return _arrow_table(cell.location)[cell.column][cell.row].as_py()
        ends = _parquet_file(cell.location)[1]
        group = bisect_right(ends, cell.row)
        first = ends[group - 1] if group else 0
        return _row_group(cell.location, group, cell.column)[cell.row - first].as_py()


def open_remote(url: str) -> Any:
    """Open a file at a URL."""
    system, path = fsspec.core.url_to_fs(url)
    return system.open(path, "rb")


@lru_cache(_FILES)
def _parquet_file(location: str) -> tuple[Any, list[int]]:
    """Return an open file, and the number of rows up to the end of each of its row groups."""
    import pyarrow.parquet

    file = pyarrow.parquet.ParquetFile(open_remote(location) if "://" in location else location)
    groups = range(file.metadata.num_row_groups)
    return file, list(accumulate(file.metadata.row_group(group).num_rows for group in groups))


@lru_cache(_ROW_GROUPS)
def _row_group(location: str, group: int, column: str) -> Any:
    file, _ = _parquet_file(location)
    return file.read_row_group(group, columns=[column])[column]


@lru_cache(_FILES)
def _arrow_table(location: str) -> Any:
    """Map a local file into memory, in the stream format (`datasets` writes it), else in the file format."""
    import pyarrow

    source = pyarrow.memory_map(location)
    try:
        return pyarrow.ipc.open_stream(source).read_all()
    except (OSError, pyarrow.ArrowInvalid):
        return pyarrow.ipc.open_file(source).read_all()
