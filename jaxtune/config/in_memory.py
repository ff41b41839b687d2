"""Datasets that Python code gave: a config holds their names, which have a fingerprint of the samples in them."""

import hashlib
import itertools
import json
import uuid
from typing import Any

from jaxtune.errors import UserError

PREFIX = "python:"
"""How the names begin, as the path of an entry of data.datasets."""

_ITERABLE = f"{PREFIX}IterableDataset-"
_PROCESS = uuid.uuid4().hex
_GIVEN: dict[str, Any] = {}
_STREAM_SAMPLES = 1000  # of an IterableDataset, which may have no end


def is_dataset(value: Any) -> bool:
    """Whether it is one of the classes that `add` takes, or a collection of them."""
    return _class_of(value) is not None


def add(value: Any) -> str:
    """Keeps a datasets.Dataset, IterableDataset or pandas DataFrame, and returns its name.

    Equal samples have the same name in every process; of an IterableDataset the first 1000 samples decide.

    Raises:
        UserError: A collection of several splits.
    """
    kind = _class_of(value)
    if kind == "DataFrame":
        import datasets
        import pyarrow

        try:
            value, kind = datasets.Dataset.from_pandas(value, preserve_index=False), "Dataset"
        except pyarrow.ArrowException as error:
            raise UserError(f"the DataFrame cannot be read: {error}") from error
    if kind not in ("Dataset", "IterableDataset"):
        raise UserError(f"a {kind} has several splits: give one of them, such as data[{next(iter(value))!r}]")
    samples = value.with_format(None)
    digest = hashlib.sha256()
    for sample in itertools.islice(samples, _STREAM_SAMPLES) if kind == "IterableDataset" else samples:
        digest.update(json.dumps(sample, default=str).encode())
    name = f"{PREFIX}{kind}-{digest.hexdigest()[:16]}"
    _GIVEN[name] = samples
    return name


def find(name: str) -> Any:
    """The dataset of a name. Raises UserError if this process was not given it."""
    if name not in _GIVEN:
        raise UserError(
            f"data: {name} was given from Python, and this process does not have it: start the run again from Python "
            "with the same dataset, or write it to a file for a new run"
        )
    return _GIVEN[name]


def identity(name: str, streaming: bool) -> str:
    """Changes whenever the samples of a name may have changed."""
    # A cache must not take the first samples of an IterableDataset for all. A stream has no cache.
    return f"{name} {_PROCESS}" if name.startswith(_ITERABLE) and not streaming else name


def _class_of(value: Any) -> str | None:
    """The name of the class of a dataset, without an import of its package; None if it is something else."""
    known = {
        ("pandas", "DataFrame"),
        *(("datasets", name) for name in ("Dataset", "IterableDataset", "DatasetDict", "IterableDatasetDict")),
    }
    classes = ((kind.__module__.partition(".")[0], kind.__name__) for kind in type(value).__mro__)
    return next((name for package, name in classes if (package, name) in known), None)
