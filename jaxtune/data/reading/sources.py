"""Open the source of samples of an entry of data.datasets: files, URLs, the hub, Python, or random tokens.

A source yields (where, sample); `where` names the file and line (or row) for messages, as in `train.jsonl:12`. The hub
is read through `datasets`; only the requested samples are downloaded.
"""

import contextlib
import dataclasses
import hashlib
import itertools
import json
import logging
import math
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxtune.config.schema import Dataset
from jaxtune.config.sources import in_memory
from jaxtune.data.images.table_cells import place_images
from jaxtune.data.reading.files import File, Found, find, is_url
from jaxtune.data.reading.readers import SUFFIXES, Report, Sample, Samples, has_samples, is_binary, is_table, read_file
from jaxtune.data.reading.sample_filter import select_samples
from jaxtune.data.reading.user_files import fingerprint
from jaxtune.errors import UserError, format_count, hide_secrets, near_paths

log = logging.getLogger("jaxtune")

# Hashing reads every byte at each start of a run.
_FEW_FILES, _FEW_BYTES = 1000, 2**26  # up to these sizes, local files are identified by their content
_PART_BYTES, _PARTS = 2**16, 4  # what is hashed of a larger file of a stream

_NOTES = ("readme", "license", "notice", "requirements", "citation")  # texts about a dataset

DUMMY = "dummy"
"""The path of random tokens, for measurements of speed."""


@dataclass(frozen=True)
class SampleSource:
    """The source of one entry of data.datasets, located but not read yet.

    Attributes:
        name: the entry's path as the user wrote it, without secrets.
        identity: changes whenever the samples may have changed (files, sizes, times, or the hub's revision).
        content: returns a text that copies of the samples have too, on another host and at another time, and nearly
            always another one if samples differ: `identity` without paths and times of local files, which are sampled.
        read: yields (where, sample); samples that cannot be read go to `report`.
    """

    name: str
    identity: str
    content: Callable[[], str]
    read: Callable[[Report], Samples]


def _log(line: str) -> None:
    log.info("data: %s", line)


def open_source(
    entry: Dataset, vocabulary: int = 256, streaming: bool = False, say: Callable[[str], object] = _log
) -> SampleSource:
    """Locate the source of an entry: files, folders, URLs, else a dataset on the hub; or random tokens.

    Args:
        entry: the entry; it also selects samples and columns, and names the function that changes them.
        vocabulary: number of different tokens, if they are random.
        streaming: whether to read a dataset on the hub without downloading it completely first.
        say: called with lines about the data, while it is read.

    Raises:
        UserError: the source does not exist, or none of its files match.
    """
    if not entry.path:
        raise UserError("data.datasets: an entry has no path; give a file, a folder, a URL or a hub id")
    _check_encoding(entry.encoding)
    if entry.path == DUMMY:
        source = _random(entry, vocabulary)
    elif isinstance(entry.path, str) and entry.path.startswith(in_memory.PREFIX):
        source = _from_python(entry, entry.path, streaming, say)
    else:
        source = _find_files(entry, entry.path, streaming, say)
    if entry.function:
        source = _with_function(source, fingerprint(entry.function, "data: function"))
    return dataclasses.replace(source, read=lambda report: select_samples(source.read(report), entry, report))


def _with_function(source: SampleSource, function: str) -> SampleSource:
    """Return the source with a hash of the function that changes its samples in its identity and content."""
    return dataclasses.replace(source, identity=source.identity + function, content=lambda: source.content() + function)


def _random(entry: Dataset, vocabulary: int) -> SampleSource:
    """Return a source of endless samples of random tokens."""

    def read(report: Report) -> Samples:
        rng = np.random.default_rng(0)  # the same tokens in every run
        for i in itertools.count():
            yield f"{DUMMY} row {i}", {"input_ids": rng.integers(vocabulary, size=entry.dummy_length)}

    return SampleSource(DUMMY, str(vocabulary), lambda: str(vocabulary), read)


def _from_python(entry: Dataset, name: str, streaming: bool, say: Callable[[str], object]) -> SampleSource:
    """Return the source of a dataset passed from Python; it is only read if it is not in the cache."""
    _check_unused(entry, "it is a dataset from Python", "subset", "revision", "split", "glob", "ds_type", "encoding")

    def read(report: Report) -> Samples:
        samples = ((f"{name} row {i}", row) for i, row in enumerate(in_memory.find(name)))
        if in_memory.stream_note(name) is None:  # rows of an IterableDataset are not found again by their number
            samples = ((where, place_images(row, name, i, "python")) for i, (where, row) in enumerate(samples))
        yield from _without_nulls(samples, name, set(), say)

    if streaming and (line := in_memory.stream_note(name)):
        say(line)
    identity = in_memory.identity(name, streaming)
    return SampleSource(name, identity, lambda: identity, read)


def _find_files(
    entry: Dataset, path: str | tuple[str, ...], streaming: bool, say: Callable[[str], object]
) -> SampleSource:
    """Return the source of files, folders or URLs; of a dataset on the hub, if there is no such file."""
    paths = (path,) if isinstance(path, str) else path
    matches = [find(one, _patterns(entry)) for one in paths]
    if isinstance(path, str) and matches == [None]:
        return _open_hub(entry, path, streaming, say)
    files = [file for one, match in zip(paths, matches) for file in _files(one, match, entry)]
    try:
        versions = [file.version() for file in files]
        identity = json.dumps(versions + ([] if streaming else _contents(files)))
    except OSError as error:
        raise UserError(f"data: {error}") from error

    def read(report: Report) -> Samples:
        said: set[str] = set()
        for file in files:
            samples = read_file(file, entry, report)
            yield from _without_nulls(samples, file.name, said, say) if is_table(file, entry) else samples

    def content() -> str:
        return json.dumps([version for _, version, *_ in versions] + _sample(files))  # sizes of local files first

    return SampleSource(hide_secrets(", ".join(paths)), identity, content, read)


def _contents(files: list[File]) -> list[str]:
    """Return hashes of local files, if they are few and small: a file may be rewritten with the same size and time."""
    local = [Path(file.location) for file in files if not is_url(file.location)]
    if len(local) > _FEW_FILES or sum(path.stat().st_size for path in local) > _FEW_BYTES:
        return []
    return [hashlib.sha256(path.read_bytes()).hexdigest() for path in local]


def _sample(files: list[File]) -> list[str]:
    """Return a hash of parts of local files, in a list; if there are many, of evenly spaced ones."""
    local, digest = [file for file in files if not is_url(file.location)], hashlib.sha256()
    for file in local[:: math.ceil(len(local) / _FEW_FILES) or 1]:
        with file.raw() as stream:
            last = max(0, stream.seek(0, os.SEEK_END) - _PART_BYTES)
            for part in range(_PARTS):
                stream.seek(part * last // (_PARTS - 1))
                digest.update(stream.read(_PART_BYTES))
    return [digest.hexdigest()]


def _without_nulls(samples: Samples, name: str, said: set[str], say: Callable[[str], object]) -> Samples:
    """Yield the samples of a table without the keys of nested objects that are null.

    Parquet and Arrow give each object the keys of all others, with null for a missing one. A null that the user wrote
    looks the same, so a line for the user reports it, once for each column; `said` holds these columns.
    """
    for where, sample in samples:
        cleaned = {column: _without_null_keys(value) for column, value in sample.items()}
        for column, value in cleaned.items():
            if column not in said and value is not sample[column] and value != sample[column]:
                said.add(column)
                reason = "as Parquet and Arrow give each object the keys of all others"
                say(f"{name}: keys in column {column!r} that are null are left out, {reason}")
        yield where, cleaned


def _without_null_keys(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_null_keys(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list) and isinstance(next((inner for inner in value if inner is not None), None), dict | list):
        return [_without_null_keys(inner) for inner in value]
    return value


def _patterns(entry: Dataset) -> tuple[str, ...]:
    return (entry.glob,) if isinstance(entry.glob, str) else entry.glob or ()


def _files(path: str, match: Found, entry: Dataset) -> list[File]:
    """Return the files to read from the result of `find` for a path."""
    if match is None:
        raise UserError(f"data: no such file or folder: {path}{'' if is_url(path) else near_paths(Path(path))}")
    _check_unused(entry, f"{path} is a file or folder, not on the hub", "subset", "revision")
    if isinstance(match, dict):
        return _files_of_folder(path, match, entry)
    _check_unused(entry, f"{path} names the files", "glob", "split")
    return [match] if isinstance(match, File) else match


def _check_unused(entry: Dataset, reason: str, *names: str):
    """Raise UserError if the entry sets an option of `names`, because it has no effect here; `reason` says why."""
    for name in names:
        if getattr(entry, name) != getattr(Dataset(), name):
            raise UserError(f"data: {name} = {getattr(entry, name)!r} has no effect: {reason}")


def _check_encoding(name: str):
    """Raise UserError for an unknown encoding, or one in which a newline is not the single byte 0x0a."""
    try:
        newline = "\n".encode(name)
    except LookupError as error:
        raise UserError(f"data: encoding={name!r} is not known; 'utf-8', 'cp1252' and 'gb18030' are some") from error
    if newline != b"\n":
        raise UserError(f"data: encoding={name!r} does not end a line with one byte; convert the file to UTF-8")


def _open_hub(entry: Dataset, hub_id: str, streaming: bool, say: Callable[[str], object]) -> SampleSource:
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", hub_id) or Path(hub_id).suffix in SUFFIXES:
        raise UserError(f"data: no such file or folder: {hub_id}{near_paths(Path(hub_id))}")
    _check_unused(entry, f"{hub_id} is a dataset on the hub", "encoding", "ds_type")
    try:
        rows, identity, content = _hub_rows(entry, hub_id, streaming or entry.samples is not None)
    except Exception as error:  # the hub client raises a dozen unrelated types; all mean that the data is out of reach
        raise UserError(f"data: {hub_id} is not a file or folder here, and the hub answers: {error}") from error

    def read(report: Report) -> Samples:
        try:
            numbered = ((f"{hub_id} ({entry.split}) row {i}", row) for i, row in enumerate(rows))
            yield from _without_nulls(numbered, hub_id, set(), say)
        except Exception as error:  # never skipped: all samples after it are missing too
            raise UserError(f"data: {hub_id} cannot be read to its end: {error}") from error

    return SampleSource(hub_id, json.dumps(identity), lambda: json.dumps(content), read)


def _hub_rows(entry: Dataset, hub_id: str, streaming: bool) -> tuple[Iterable[Sample], Any, Any]:
    """Return (the rows of a split, their identity, their content), streamed if `streaming` and possible.

    Identity and content are as in `SampleSource`.
    """
    import datasets

    files: dict[str, Any] = {"data_files": list(_patterns(entry))} if entry.glob else {}
    if streaming and "[" not in entry.split:  # a slice of a split cannot be streamed
        builder: Any = datasets.load_dataset_builder(hub_id, entry.subset, revision=entry.revision, **files)
        with contextlib.suppress(NotImplementedError):  # nor can some kinds of archive
            # The hash is the commit that the revision names now; the rows are read from this commit.
            return builder.as_streaming_dataset(split=entry.split), builder.hash, builder.hash
    rows: Any = datasets.load_dataset(hub_id, entry.subset, split=entry.split, revision=entry.revision, **files)
    sizes = {str(name): name.stat().st_size for name in sorted(Path(file["filename"]) for file in rows.cache_files)}
    return rows, [[*sizes.items()], rows.num_rows], [[*sizes.values()], rows.num_rows]


def _files_of_folder(path: str, in_folder: dict[str, File], entry: Dataset) -> list[File]:
    """Return the files of a folder to read, in the order of their relative paths."""
    if "dataset_dict.json" in in_folder:  # written by DatasetDict.save_to_disk: one folder per split
        start = f"{entry.split}/"
        in_folder = {name.removeprefix(start): file for name, file in in_folder.items() if name.startswith(start)}
        if not in_folder:
            raise UserError(f"data: {path} has no split {entry.split!r}")
    if "state.json" in in_folder:  # written by Dataset.save_to_disk: lists its Arrow files in order
        with in_folder["state.json"].open() as stream:
            return [in_folder[shard["filename"]] for shard in json.load(stream)["_data_files"]]
    files = list(in_folder.values())
    if entry.glob is not None:
        _check_unused(entry, "glob chooses the files", "split")
    elif data := [file for file in files if has_samples(file, entry)]:
        _warn_unread(path, files, data)
        files = _files_of_split(path, data, entry)
    else:
        _check_unused(entry, f"the files of {path} are text, without splits", "split")
        files = [file for file in files if not is_binary(file)]
    if not files:
        kinds = ", ".join(sorted({file.kind or file.name for file in in_folder.values()})[:5])
        unread = f" is text or a file of samples; it holds {kinds}" if kinds else ""
        raise UserError(f"data: no file in {path}" + (f" matches {entry.glob!r}" if entry.glob else unread))
    return files


def _warn_unread(path: str, files: list[File], data: list[File]) -> None:
    """Warn of texts next to files of samples, because only samples are read; notes about a dataset are expected."""
    named = [(file, Path(file.name).name.lower()) for file in files if file.kind == ".txt"]
    texts = [file for file, name in named if not name.startswith(_NOTES)]
    if texts:
        log.warning(
            "data: %s: %s read, but not %s next to them, such as %s; glob='*.txt' reads texts instead",
            *(path, format_count(len(data), "file of samples is", "files of samples are")),
            *(format_count(len(texts), "text file"), texts[0].name),
        )


def _files_of_split(path: str, files: list[File], entry: Dataset) -> list[File]:
    """Return the files of the entry's split, recognised by their names as `datasets` does (train.jsonl, test.jsonl)."""
    from datasets.data_files import DataFilesList, get_data_patterns

    root = path if is_url(path) else str(Path(path).expanduser())
    patterns = get_data_patterns(root)
    if entry.split not in patterns:
        raise UserError(
            f"data: the files of {path} are named after the splits {', '.join(map(str, patterns))}, none is "
            f"{entry.split!r}; set split, or choose files with glob"
        )
    chosen = {_resolve(name) for name in DataFilesList.from_patterns(patterns[entry.split], base_path=root)}
    return [file for file in files if _resolve(file.location) in chosen]


def _resolve(name: str) -> str:
    return name if is_url(name) else os.path.realpath(name)
