"""Which samples and columns of a source are used, and the user's own function over them."""

import hashlib
import importlib.util
from collections.abc import Callable
from itertools import islice
from pathlib import Path

from jaxtune.config.schema import Dataset
from jaxtune.data.messages import clip
from jaxtune.data.readers import Report, Sample, Samples
from jaxtune.errors import UserError


def selected(samples: Samples, entry: Dataset, report: Report) -> Samples:
    """The samples that the entry asks for, with the columns that it asks for, changed by its function.

    Raises:
        UserError: no sample has a selected column; the function is not there.
    """
    change = _load(entry.function) if entry.function else None
    missing = set(entry.select_columns or ())
    for where, sample in islice(islice(samples, entry.shard_idx or 0, None, entry.shards or 1), entry.samples):
        if entry.select_columns is not None:
            missing -= sample.keys()
            sample = {column: sample[column] for column in entry.select_columns if column in sample}
        if change is not None:
            try:
                sample = _changed(sample, change)
            except UserError as error:
                report(UserError(f"{where}: {entry.function}: {error}"))
                continue
        if sample is not None:
            yield where, sample
    if missing:
        raise UserError(f"data: select_columns: no sample has {', '.join(map(repr, sorted(missing)))}")


def fingerprint(function: str) -> str:
    """Changes when the file of a function does. Raises UserError unless it is FILE.py:NAME of a file that is there."""
    path, _, name = function.rpartition(":")
    if not path.endswith(".py") or not name.isidentifier():
        raise UserError(f"data: function={function!r} is not FILE.py:NAME, such as 'prepare.py:to_messages'")
    try:
        return hashlib.sha256(Path(path).expanduser().read_bytes()).hexdigest()
    except OSError as error:
        raise UserError(f"data: function={function!r}: {error.strerror or error}") from error


def _load(function: str) -> Callable[[dict], object]:
    path, _, name = function.rpartition(":")
    spec = importlib.util.spec_from_file_location(Path(path).stem, Path(path).expanduser())
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # the file is the user's program: it can fail in any way
        raise UserError(f"data: function={function!r}: {path} fails: {type(error).__name__}: {error}") from error
    found = getattr(module, name, None)
    if not callable(found):
        raise UserError(f"data: function={function!r}: {path} has no function {name}")
    return found


def _changed(sample: Sample, change: Callable[[dict], object]) -> Sample | None:
    try:
        result = change(dict(sample))
    except Exception as error:  # as above
        raise UserError(f"{type(error).__name__}: {error}") from error
    if result is not None and not isinstance(result, dict):
        raise UserError(f"it must return a dict of columns, or None to leave the sample out, not {clip(repr(result))}")
    return result
