"""Read samples from files: JSON lines, JSON, CSV, Parquet, Arrow, or text with one document a file.

JSON lines, JSON and CSV are parsed here, strictly, because readers made for speed do not name the line and accept half
a line or a wrong type. Parquet is read through `datasets`. Arrow is not, because `datasets` would decode the
dictionaries of all rows of a file in one step. Errors of samples go to `report`.
"""

import codecs
import contextlib
import csv
import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxtune.config.schema import Dataset
from jaxtune.data.chat.messages import clip
from jaxtune.data.images.table_cells import place_images
from jaxtune.data.reading.files import File, is_url
from jaxtune.errors import UserError

if TYPE_CHECKING:
    import pyarrow

log = logging.getLogger("jaxtune")

Sample = Mapping[str, Any]
Samples = Iterator[tuple[str, Sample]]
Report = Callable[[UserError], None]
"""Takes the error of a sample that cannot be used: raises it (data.on_bad_row='error') or counts it ('skip')."""

BINARY_PROBE_BYTES = 8192
_ARCHIVES = (".zip", ".tar", ".tgz", ".7z", ".rar", ".xz")
_DELIMITERS = ",;\t|"
_TABLE_ROWS = 4  # rows of Parquet decoded in one step: a long value in a dictionary may be in every row


def read_file(file: File, entry: Dataset, report: Report) -> Samples:
    """Yield (where, sample) for the samples of a file, in the format that the entry or the suffix names."""
    try:
        yield from _READERS.get(_format(file, entry), _read_text)(file, entry, report)
    except UserError:
        raise
    except Exception as error:  # each remote file system raises types of its own
        if is_url(file.name):  # never skipped: all samples after it are missing too
            raise UserError(f"{file.name} cannot be read to its end: {error or type(error).__name__}") from error
        if not isinstance(error, OSError):
            raise
        report(UserError(f"{file.name}: cannot be read: {error.strerror or error}"))


def has_samples(file: File, entry: Dataset) -> bool:
    """Whether a file holds samples, not one text."""
    return _format(file, entry) in _READERS


def is_table(file: File, entry: Dataset) -> bool:
    """Whether a file is Parquet or Arrow, in which an object has a null for each key that only other objects have."""
    return _READERS.get(_format(file, entry)) is _read_table


def folder_of(where: str) -> str:
    """Return the folder, or URL of a folder, of the file that the place of a sample names: `train.jsonl:12`."""
    return os.path.dirname(re.sub(r"(:| row )\d+$", "", where))


def size_of(value: Any) -> int:
    """Return roughly the number of characters of a sample."""
    if isinstance(value, dict):
        return sum(map(size_of, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(size_of, value)) if value and not isinstance(value[0], int) else len(value)
    return len(value) if isinstance(value, str | bytes) else 1


def is_binary(file: File) -> bool:
    """Whether a file has a NUL near its start, the test with which git recognises binary files."""
    with contextlib.suppress(OSError), file.open() as stream:
        return b"\0" in stream.read(BINARY_PROBE_BYTES)
    return False  # the error is reported when the file is read


def _format(file: File, entry: Dataset) -> str:
    return f".{entry.ds_type}" if entry.ds_type else file.kind


@contextlib.contextmanager
def _reporting(report: Report) -> Iterator[None]:
    try:
        yield
    except UserError as error:
        report(error)


def _too_large(where: str, what: str, entry: Dataset) -> UserError:
    limit = f"max_sample_bytes={entry.max_sample_bytes}"
    return UserError(f"{where}: {what} is larger than {limit}; raise it if the file is correct")


def _whole(file: File, entry: Dataset) -> bytes:
    """Return the content of a file. Raises UserError if it decompresses to more than max_sample_bytes."""
    with file.open() as stream:
        content = stream.read(entry.max_sample_bytes + 1 if file.is_compressed else -1)  # -1: the whole file
    if file.is_compressed and len(content) > entry.max_sample_bytes:
        raise _too_large(file.name, "the decompressed file", entry)
    return content


def _decode(raw: bytes, where: str, encoding: str) -> str:
    try:
        text = raw.decode(encoding)
    except UnicodeDecodeError as error:
        if raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            raise UserError(
                f"{where}: UTF-16, not {encoding.upper()}; convert the file: `iconv -f UTF-16 -t UTF-8 FILE > NEW`"
            ) from None
        raise UserError(
            f"{where}: not {encoding.upper()}: byte 0x{raw[error.start]:02x} at byte {error.start + 1}; "
            "encoding='cp1252', for example, reads text from Windows"
        ) from None
    if "\0" in text:
        raise UserError(f"{where}: holds a NUL character at column {text.index(chr(0)) + 1}; is it binary?")
    return text


def _lines(file: File, entry: Dataset, report: Report) -> Iterator[tuple[str, str]]:
    """Yield lines as (where, text), strictly decoded. Memory is bounded by max_sample_bytes, however long a line is."""
    number = 0
    with file.open() as stream:
        while raw := stream.readline(entry.max_sample_bytes + 1):  # one more, for the line break
            number += 1
            where = f"{file.name}:{number}"
            if len(raw) > entry.max_sample_bytes and not raw.endswith(b"\n"):
                # Skip the rest of the line, in chunks, so that the next line has its number.
                report(_too_large(where, "the line", entry))
                while raw and not raw.endswith(b"\n"):
                    raw = stream.readline(entry.max_sample_bytes)
                continue
            with _reporting(report):
                text = _decode(raw, where, entry.encoding)
                yield where, text.removeprefix("\ufeff") if number == 1 else text
    if number == 0:
        report(UserError(f"{file.name}: empty file"))


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"key {next(key for key in keys if keys.count(key) > 1)!r} occurs twice")
    return unique


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_unique_keys)
    except json.JSONDecodeError as error:
        place = f"column {error.colno}" if error.lineno == 1 else f"line {error.lineno}, column {error.colno}"
        half = "; half a line?" if error.pos >= len(text.rstrip()) or "Unterminated" in error.msg else ""
        raise UserError(f"{where}: not JSON: {error.msg.removesuffix(' at')} at {place}{half}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not usable JSON: {error}") from None


def _object(value: Any, where: str) -> Sample:
    if not isinstance(value, dict):
        raise UserError(f'{where}: expected an object such as {{"text": ...}}, found {type(value).__name__}')
    return value


def _read_jsonl(file: File, entry: Dataset, report: Report) -> Samples:
    for where, line in _lines(file, entry, report):
        if not line.isspace():
            with _reporting(report):
                yield where, _object(_parse(line, where), where)


def _read_json(file: File, entry: Dataset, report: Report) -> Samples:
    """Read a list of objects, an object over several lines, or JSON lines."""
    # The first line shows which of the three it is. A whole file is parsed in memory; JSON lines are not.
    with file.open() as stream:
        line = stream.readline(BINARY_PROBE_BYTES).removeprefix(b"\xef\xbb\xbf")  # the byte-order mark in UTF-8
        while line.isspace():
            line = stream.readline(BINARY_PROBE_BYTES)
    begins = line.strip()
    opens = begins.startswith(b"{") and line.endswith(b"\n") and begins.endswith((b"{", b"[", b","))
    if not begins.startswith(b"[") and not opens:
        yield from _read_jsonl(file, entry, report)
        return
    rows = []
    with _reporting(report):
        rows = _parse(_decode(_whole(file, entry), file.name, entry.encoding).removeprefix("\ufeff"), file.name)
    for i, row in enumerate([rows] if isinstance(rows, dict) else rows):
        where = f"{file.name} row {i}"
        with _reporting(report):
            yield where, _object(row, where)


def _read_csv(file: File, entry: Dataset, report: Report) -> Samples:
    """Read CSV, or tab-separated columns of .tsv. Every value is a string, in a column of numbers too."""
    csv.field_size_limit(entry.max_sample_bytes)  # 131,072 characters by default
    where = file.name

    def lines() -> Iterator[str]:
        nonlocal where
        for place, line in _lines(file, entry, report):
            where = place
            yield line

    delimiter = "\t" if _format(file, entry) == ".tsv" else ","
    reader = csv.DictReader(lines(), strict=True, delimiter=delimiter)
    header = None
    while True:
        try:
            header = header or _check_header(reader.fieldnames or (), delimiter, file)
            row = next(reader, None)
        except csv.Error as error:
            large = "field larger than field limit" in str(error)
            report(_too_large(where, "a field", entry) if large else UserError(f"{where}: not CSV: {error}"))
            continue
        if row is None:
            return
        if None in row or None in row.values():  # DictReader's key of extra fields, its value of missing ones
            report(UserError(f"{where}: the row and the header differ in their number of columns"))
        else:
            yield where, row


def _check_header(names: Sequence[str], delimiter: str, file: File) -> Sequence[str]:
    """Return the names of the columns. Raises UserError if another delimiter separates them."""
    other_delimiters = [other for other in _DELIMITERS if other != delimiter and len(names) == 1 and other in names[0]]
    if other_delimiters:
        remedy = "set ds_type='tsv'" if other_delimiters[0] == "\t" else "write the file with commas"
        remedy = "set ds_type='csv'" if other_delimiters[0] == "," else remedy
        raise UserError(
            f"{file.name}: its fields are separated by {other_delimiters[0]!r}, not by {delimiter!r}: the header "
            f"{clip(repr(names[0]))} is one column; {remedy}"
        )
    return names


def _read_table(file: File, entry: Dataset, report: Report) -> Samples:
    import pyarrow
    from datasets.exceptions import DatasetsError

    # The errors that it logs are raised too.
    logging.getLogger("datasets.packaged_modules").setLevel(logging.CRITICAL)
    kind = "arrow" if _format(file, entry) == ".arrow" else "parquet"
    try:
        for i, row in enumerate(_arrow_rows(file, entry) if kind == "arrow" else _parquet_rows(file)):
            where = f"{file.name} row {i}"
            if row is None or size_of(row) > entry.max_sample_bytes:
                report(_too_large(where, "the row", entry))
            else:
                # A compressed file cannot be read from its middle.
                yield where, row if file.is_compressed else place_images(row, file.location, i, kind)
    except (ValueError, KeyError, OSError, DatasetsError, pyarrow.ArrowException) as error:
        if isinstance(error, OSError) and error.filename is not None:  # from the file system, not from pyarrow
            raise
        report(UserError(f"{file.name}: not a readable {kind} file: {error}"))


def _parquet_rows(file: File) -> Iterator[Sample]:
    import datasets

    options: dict[str, Any] = {"split": "train", "streaming": True, "batch_size": _TABLE_ROWS}
    rows: Any = datasets.load_dataset("parquet", data_files=file.location, **options)
    yield from rows.decode(False)  # images as {bytes, path}


def _arrow_rows(file: File, entry: Dataset) -> Iterator[Sample | None]:
    """Yield each row, decoded by itself; None for a row that would be larger than max_sample_bytes."""
    for batch in _arrow_batches(file):
        batch.validate(full=True)
        encoded = [column for column in batch.columns if "dictionary<" in str(column.type)]
        if not encoded:
            yield from batch.to_pylist()
        for i in range(batch.num_rows if encoded else 0):
            size = sum(_decoded_bytes(column.slice(i, 1)) for column in encoded)
            yield None if size > entry.max_sample_bytes else batch.slice(i, 1).to_pylist()[0]


def _arrow_batches(file: File) -> Iterator["pyarrow.RecordBatch"]:
    """Yield the batches of an Arrow file in the stream format (`datasets` writes it), else in the file format."""
    import pyarrow

    with file.open() as stream:
        try:
            batches = pyarrow.ipc.open_stream(stream)
        except (OSError, pyarrow.ArrowInvalid):
            batches = None
        if batches is not None:
            yield from batches
            return
    with file.open() as stream:
        reader = pyarrow.ipc.open_file(stream)
        yield from (reader.get_batch(i) for i in range(reader.num_record_batches))


def _decoded_bytes(array: "pyarrow.Array") -> int:
    """Return roughly the size in bytes of an array after its dictionaries are decoded, without decoding them."""
    import pyarrow

    if pyarrow.types.is_dictionary(array.type):
        counts = array.indices.drop_null().value_counts()
        values = array.dictionary.take(counts.field("values"))  # each used value once
        return sum(values[i : i + 1].nbytes * count.as_py() for i, count in enumerate(counts.field("counts")))
    if pyarrow.types.is_struct(array.type):
        return sum(map(_decoded_bytes, array.flatten()))
    if pyarrow.types.is_list(array.type) or pyarrow.types.is_large_list(array.type):
        return _decoded_bytes(array.flatten())
    return array.nbytes


def _read_text(file: File, entry: Dataset, report: Report) -> Samples:
    """Read a whole file as one document. An empty file is an error if the entry names it; in a folder it is ignored."""
    with _reporting(report):
        if file.kind in _ARCHIVES:
            raise UserError(f"{file.name}: an archive is not read; unpack it, and name the folder")
        text = _decode(_whole(file, entry), file.name, entry.encoding).removeprefix("\ufeff")
        if file.named and not entry.ds_type and _is_json_lines(text):
            log.warning("data: %s is read as one text, but holds JSON lines; ds_type='json' reads them", file.name)
        if text.strip():
            yield file.name, {entry.text_field: text}
        elif file.named:
            raise UserError(f"{file.name}: empty file")


def _is_json_lines(text: str) -> bool:
    """Whether a text begins with two lines that are JSON objects."""
    lines = text.split("\n", 2)[:2]
    try:
        return len(lines) == 2 and all(isinstance(json.loads(line), dict) for line in lines)
    except (ValueError, RecursionError):
        return False


_READERS: dict[str, Callable[[File, Dataset, Report], Samples]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".parquet": _read_table,
    ".arrow": _read_table,
}
SUFFIXES = frozenset(_READERS)
"""Suffixes of files that hold samples; any other file is text."""
