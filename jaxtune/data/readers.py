"""Samples from files: JSON lines, JSON, CSV, Parquet, Arrow, or text, one document a file.

JSON lines, JSON and CSV are read here, strictly, because readers made for speed do not name the line and let half a
line or a wrong type pass. Parquet and Arrow go through `datasets`. What cannot be read goes to `report`.
"""

import contextlib
import csv
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jaxtune.config.schema import Dataset
from jaxtune.data.files import File, is_url
from jaxtune.errors import UserError

Sample = Mapping[str, Any]
Samples = Iterator[tuple[str, Sample]]
Report = Callable[[UserError], None]
"""Takes a sample that cannot be used: raises it (data.on_bad_row='error') or counts it ('skip')."""

MAX_LINE_BYTES = 2**28
BINARY_PROBE_BYTES = 8192


def read_file(file: File, entry: Dataset, report: Report) -> Samples:
    """The samples of a file, in the format that the entry or the suffix names, with where each stands."""
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
    """Whether it is a file of samples, as opposed to a text."""
    return _format(file, entry) in _READERS


def is_binary(file: File) -> bool:
    """Whether a file holds a NUL near its start, which is how git tells binary from text."""
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


def _decode(raw: bytes, where: str, encoding: str) -> str:
    try:
        text = raw.decode(encoding)
    except UnicodeDecodeError as error:
        raise UserError(
            f"{where}: not {encoding.upper()}: byte 0x{raw[error.start]:02x} at byte {error.start + 1}; "
            "encoding='cp1252', for example, reads text from Windows"
        ) from None
    if "\0" in text:
        raise UserError(f"{where}: holds a NUL character at column {text.index(chr(0)) + 1}; is it binary?")
    return text


def _lines(file: File, entry: Dataset, report: Report) -> Iterator[tuple[str, str]]:
    """Lines as (where, text), strictly decoded, read with bounded memory."""
    number = 0
    with file.open() as stream:
        while raw := stream.readline(MAX_LINE_BYTES):
            number += 1
            where = f"{file.name}:{number}"
            if len(raw) == MAX_LINE_BYTES and not raw.endswith(b"\n"):
                report(UserError(f"{where}: line is longer than {MAX_LINE_BYTES} bytes; is it a file of JSON lines?"))
                while raw and not raw.endswith(b"\n"):
                    raw = stream.readline(MAX_LINE_BYTES)
                continue
            with _reporting(report):
                text = _decode(raw, where, entry.encoding)
                yield where, text.removeprefix("\ufeff") if number == 1 else text
    if number == 0:
        report(UserError(f"{file.name}: empty file"))


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"key {next(key for key in keys if keys.count(key) > 1)!r} occurs twice")
    return found


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
    """A list of objects; JSON lines in a file of this suffix are read too."""
    with file.open() as stream:
        if not stream.read(BINARY_PROBE_BYTES).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
            yield from _read_jsonl(file, entry, report)
            return
    rows = []
    with _reporting(report), file.open() as stream:
        rows = _parse(_decode(stream.read(), file.name, entry.encoding).removeprefix("\ufeff"), file.name)
    for i, row in enumerate(rows):
        where = f"{file.name} row {i}"
        with _reporting(report):
            yield where, _object(row, where)


def _read_csv(file: File, entry: Dataset, report: Report) -> Samples:
    """Every value is a string: a column of numbers is still text. Columns of .tsv are separated by tabs."""
    csv.field_size_limit(MAX_LINE_BYTES)
    where = file.name

    def lines() -> Iterator[str]:
        nonlocal where
        for place, line in _lines(file, entry, report):
            where = place
            yield line

    reader = csv.DictReader(lines(), strict=True, delimiter="\t" if _format(file, entry) == ".tsv" else ",")
    while True:
        try:
            row = next(reader, None)
        except csv.Error as error:
            report(UserError(f"{where}: not CSV: {error}"))
            continue
        if row is None:
            return
        if None in row or None in row.values():
            report(UserError(f"{where}: the row and the header differ in their number of columns"))
        else:
            yield where, row


def _read_table(file: File, entry: Dataset, report: Report) -> Samples:
    import datasets
    from datasets.exceptions import DatasetsError

    builder = _format(file, entry)[1:]
    try:
        rows = datasets.load_dataset(builder, data_files=file.location, split="train", streaming=True)
        for i, row in enumerate(rows):
            yield f"{file.name} row {i}", row
    except (ValueError, KeyError, DatasetsError) as error:
        report(UserError(f"{file.name}: not a readable {builder} file: {error}"))


def _read_text(file: File, entry: Dataset, report: Report) -> Samples:
    """The whole file is one document. An empty file is an error if the entry names it, and ignored in a folder."""
    with _reporting(report), file.open() as stream:
        text = _decode(stream.read(), file.name, entry.encoding)
        if text.strip():
            yield file.name, {entry.text_field: text}
        elif file.named:
            raise UserError(f"{file.name}: empty file")


_READERS: dict[str, Callable[[File, Dataset, Report], Samples]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".parquet": _read_table,
    ".arrow": _read_table,
}
SUFFIXES = frozenset(_READERS)
"""Of files of samples; any other file is text."""
