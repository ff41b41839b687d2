"""Where samples come from: one entry of data.datasets becomes a stream of (where, sample).

`where` names the file and line (or row) for messages, as in `train.jsonl:12`. JSON lines, JSON and CSV are read here,
strictly, because readers made for speed do not name the line and let half a line or a wrong type pass. Parquet, Arrow
and the hub go through `datasets`; only the samples that are asked for are downloaded from the hub. Any other file is
text, one document a file. Compressed files are decompressed.
"""

import contextlib
import csv
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from jaxtune.config.schema import Dataset
from jaxtune.errors import UserError

Sample = Mapping[str, Any]
Samples = Iterator[tuple[str, Sample]]
Report = Callable[[UserError], None]
"""Takes a sample that cannot be used: raises it (data.on_bad_row='error') or counts it ('skip')."""

MAX_LINE_BYTES = 2**28
_BINARY_PROBE_BYTES = 8192
_COMPRESSED = (".gz", ".bz2", ".zst", ".lz4")


@dataclass(frozen=True)
class Source:
    """One entry of data.datasets, found but not read yet.

    Attributes:
        name: the entry's path, as the user wrote it.
        identity: changes whenever the samples may have changed (files, sizes, times, or the hub's revision).
        read: yields (where, sample); samples that cannot be read go to `report`.
    """

    name: str
    identity: str
    read: Callable[[Report], Samples]


def open_source(entry: Dataset) -> Source:
    """Finds what an entry names: a file, a folder, or else a dataset on the hub.

    Raises:
        UserError: it does not exist, or none of its files match.
    """
    if not entry.path:
        raise UserError("data.datasets: an entry has no path; give a file, a folder or a hub id")
    _check_encoding(entry.encoding)
    path = Path(entry.path).expanduser()
    if not path.exists():
        return _open_hub(entry, entry.path)
    _check_unused(entry, f"{entry.path} is on this machine, not on the hub", "subset", "revision")
    if path.is_dir():
        files = _files(path, entry)
    else:
        _check_unused(entry, f"{entry.path} is one file", "glob", "split")
        files = [path]
    stats = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]

    def read(report: Report) -> Samples:
        for file in files:
            try:
                yield from _READERS.get(_kind(file), _read_text)(file, entry, report)
            except OSError as error:
                report(UserError(f"{file}: cannot be read: {error.strerror or error}"))

    return Source(entry.path, json.dumps(stats), lambda report: islice(read(report), entry.samples))


def _check_unused(entry: Dataset, reason: str, *names: str):
    for name in names:
        if getattr(entry, name) != getattr(Dataset(), name):
            raise UserError(f"data: {name} = {getattr(entry, name)!r} has no effect: {reason}")


def _check_encoding(name: str):
    """Raises UserError for an unknown encoding, or one in which a newline is not the single byte 0x0a."""
    try:
        found = "\n".encode(name)
    except LookupError as error:
        raise UserError(f"data: encoding={name!r} is not known; 'utf-8', 'cp1252' and 'gb18030' are some") from error
    if found != b"\n":
        raise UserError(f"data: encoding={name!r} does not end a line with one byte; convert the file to UTF-8")


def _open_hub(entry: Dataset, hub_id: str) -> Source:
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", hub_id) or _kind(Path(hub_id)) in _READERS:
        raise UserError(f"data: no such file or folder: {hub_id}")
    _check_unused(entry, f"{hub_id} is a dataset on the hub", "glob", "encoding")
    try:
        rows, identity = _hub_rows(entry, hub_id)
    except Exception as error:  # the hub client raises a dozen unrelated types; all mean that the data is out of reach
        raise UserError(f"data: {hub_id} is not a file or folder here, and the hub answers: {error}") from error

    def read(report: Report) -> Samples:
        try:
            for i, row in enumerate(islice(rows, entry.samples)):
                yield f"{hub_id} ({entry.split}) row {i}", row
        except Exception as error:  # never skipped: all samples after it are missing too
            raise UserError(f"data: {hub_id} cannot be read to its end: {error}") from error

    return Source(hub_id, json.dumps(identity), read)


def _hub_rows(entry: Dataset, hub_id: str) -> tuple[Iterable[Sample], Any]:
    """(the rows of a split, their identity as in `Source`)."""
    import datasets

    if entry.samples is not None and "[" not in entry.split:  # a slice of a split cannot be streamed
        builder: Any = datasets.load_dataset_builder(hub_id, entry.subset, revision=entry.revision)
        with contextlib.suppress(NotImplementedError):  # nor can some kinds of archive
            # The hash is the commit that the revision names now, from which the rows are read.
            return builder.as_streaming_dataset(split=entry.split), builder.hash
    found: Any = datasets.load_dataset(hub_id, entry.subset, split=entry.split, revision=entry.revision)
    names = sorted(Path(file["filename"]) for file in found.cache_files)
    return found, [[(str(name), name.stat().st_size) for name in names], found.num_rows]


def _files(folder: Path, entry: Dataset) -> list[Path]:
    """The files of a folder that are read, in the order of their relative paths."""
    if (folder / "dataset_dict.json").is_file():  # written by DatasetDict.save_to_disk: one folder per split
        folder = folder / entry.split
        if not folder.is_dir():
            raise UserError(f"data: {folder.parent} has no split {entry.split!r}")
    if (folder / "state.json").is_file():  # Dataset.save_to_disk
        return [folder / shard["filename"] for shard in json.loads((folder / "state.json").read_text())["_data_files"]]
    found = [file for file in folder.glob(entry.glob or "**/*") if file.is_file()]
    found = [file for file in found if not any(part.startswith(".") for part in file.relative_to(folder).parts)]
    found.sort(key=lambda file: file.relative_to(folder).as_posix())
    if entry.glob is not None:
        _check_unused(entry, "glob chooses the files", "split")
    else:
        data = [file for file in found if _kind(file) in _READERS]
        if data:
            found = _of_split(folder, data, entry)
        else:
            _check_unused(entry, f"the files of {folder} are text, without splits", "split")
            found = [file for file in found if not _is_binary(file)]
    if not found:
        raise UserError(f"data: no file in {folder}" + (f" matches {entry.glob!r}" if entry.glob else ""))
    return found


def _of_split(folder: Path, files: list[Path], entry: Dataset) -> list[Path]:
    """The files of the split, where file names tell splits apart (train.jsonl beside test.jsonl)."""
    from datasets.data_files import DataFilesList, get_data_patterns

    root = str(folder)
    patterns = get_data_patterns(root)
    if entry.split not in patterns:
        raise UserError(
            f"data: the files of {folder} are named after the splits {', '.join(map(str, patterns))}, none is "
            f"{entry.split!r}; set split, or choose files with glob"
        )
    chosen = {Path(name).resolve() for name in DataFilesList.from_patterns(patterns[entry.split], base_path=root)}
    return [file for file in files if file.resolve() in chosen]


def _is_binary(file: Path) -> bool:
    """Whether a file holds a NUL near its start, which is how git tells binary from text."""
    with contextlib.suppress(OSError), _open(file) as stream:
        return b"\0" in stream.read(_BINARY_PROBE_BYTES)
    return False  # the error is reported when the file is read


def _kind(file: Path) -> str:
    """The suffix that names a file's format, without that of compression: `.jsonl` for `a.jsonl.gz`."""
    return (file.with_suffix("") if file.suffix.lower() in _COMPRESSED else file).suffix.lower()


def _open(file: Path) -> BinaryIO:
    """The content of a file, decompressed by its suffix."""
    if file.suffix.lower() not in _COMPRESSED:
        return file.open("rb")
    import pyarrow  # unlike others it reads several frames as one stream, and fails where a frame is cut off

    return io.BufferedReader(pyarrow.input_stream(str(file), compression="detect"))


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


def _lines(file: Path, entry: Dataset, report: Report) -> Iterator[tuple[str, str]]:
    """Lines as (where, text), strictly decoded, read with bounded memory."""
    number = 0
    with _open(file) as stream:
        while raw := stream.readline(MAX_LINE_BYTES):
            number += 1
            where = f"{file}:{number}"
            if len(raw) == MAX_LINE_BYTES and not raw.endswith(b"\n"):
                report(UserError(f"{where}: line is longer than {MAX_LINE_BYTES} bytes; is it a file of JSON lines?"))
                while raw and not raw.endswith(b"\n"):
                    raw = stream.readline(MAX_LINE_BYTES)
                continue
            with _reporting(report):
                text = _decode(raw, where, entry.encoding)
                yield where, text.removeprefix("\ufeff") if number == 1 else text
    if number == 0:
        report(UserError(f"{file}: empty file"))


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


def _read_jsonl(file: Path, entry: Dataset, report: Report) -> Samples:
    for where, line in _lines(file, entry, report):
        if not line.isspace():
            with _reporting(report):
                yield where, _object(_parse(line, where), where)


def _read_json(file: Path, entry: Dataset, report: Report) -> Samples:
    """A list of objects; JSON lines in a file of this suffix are read too."""
    with _open(file) as stream:
        if not stream.read(_BINARY_PROBE_BYTES).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
            yield from _read_jsonl(file, entry, report)
            return
    rows = []
    with _reporting(report), _open(file) as stream:
        rows = _parse(_decode(stream.read(), str(file), entry.encoding).removeprefix("\ufeff"), str(file))
    for i, row in enumerate(rows):
        where = f"{file} row {i}"
        with _reporting(report):
            yield where, _object(row, where)


def _read_csv(file: Path, entry: Dataset, report: Report) -> Samples:
    """Every value is a string: a column of numbers is still text. Columns of .tsv are separated by tabs."""
    csv.field_size_limit(MAX_LINE_BYTES)
    where = str(file)

    def lines() -> Iterator[str]:
        nonlocal where
        for place, line in _lines(file, entry, report):
            where = place
            yield line

    reader = csv.DictReader(lines(), strict=True, delimiter="\t" if _kind(file) == ".tsv" else ",")
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


def _read_table(file: Path, entry: Dataset, report: Report) -> Samples:
    import datasets
    from datasets.exceptions import DatasetsError

    builder = _kind(file)[1:]
    try:
        rows = datasets.load_dataset(builder, data_files=str(file), split="train", streaming=True)
        for i, row in enumerate(rows):
            yield f"{file} row {i}", row
    except (ValueError, KeyError, DatasetsError) as error:
        report(UserError(f"{file}: not a readable {builder} file: {error}"))


def _read_text(file: Path, entry: Dataset, report: Report) -> Samples:
    """The whole file is one document. An empty file is an error if the entry names it, and ignored in a folder."""
    with _reporting(report), _open(file) as stream:
        text = _decode(stream.read(), str(file), entry.encoding)
        if text.strip():
            yield str(file), {entry.text_field: text}
        elif entry.path and Path(entry.path).expanduser() == file:
            raise UserError(f"{file}: empty file")


_READERS: dict[str, Callable[[Path, Dataset, Report], Samples]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".parquet": _read_table,
    ".arrow": _read_table,
}
