"""Datasets that Python code gave: a config holds their names, which have a fingerprint of the samples in them."""

import hashlib
import itertools
import json
import uuid
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from jaxtune.errors import UserError

PREFIX = "python:"
"""How the names begin, as the path of an entry of data.datasets."""

_ITERABLE = f"{PREFIX}IterableDataset-"
_STREAM_SAMPLES = 1000  # of an IterableDataset, which may have no end


@dataclass(frozen=True)
class _Given:
    """A dataset of a name. objects: those that were given by it, the last one last. token: of the last one."""

    samples: Any
    objects: tuple[Any, ...]
    token: str


_GIVEN: dict[str, _Given] = {}


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
    before = _GIVEN.get(name, _Given(None, (), ""))
    if not before.objects or before.objects[-1] is not value:
        others = tuple(other for other in before.objects if other is not value) if name.startswith(_ITERABLE) else ()
        _GIVEN[name] = _Given(samples, (*others, value), uuid.uuid4().hex)
    return name


def refuse_alike(names: Iterable[Any]) -> None:
    """Raises UserError where two entries of a config have one name, and different IterableDatasets were given by it."""
    for name, count in Counter(name for name in names if isinstance(name, str)).items():
        if count > 1 and name.startswith(_ITERABLE) and name in _GIVEN and len(_GIVEN[name].objects) > 1:
            raise UserError(
                f"data: two IterableDatasets begin with the same {_STREAM_SAMPLES:,} samples, by which they are told "
                "apart; give the same object twice, skip samples of one, or write one to a file"
            )


def find(name: str) -> Any:
    """The dataset of a name. Raises UserError if this process was not given it."""
    if name not in _GIVEN:
        raise UserError(
            f"data: {name} was given from Python, and this process does not have it: start the run again from Python "
            "with the same dataset, or write it to a file for a new run"
        )
    return _GIVEN[name].samples


def identity(name: str, streaming: bool) -> str:
    """Changes whenever the samples of a name may have changed."""
    # A cache must not take the first samples of an IterableDataset for all. A stream has no cache.
    if not name.startswith(_ITERABLE) or streaming:
        return name
    return f"{name} {_GIVEN[name].token if name in _GIVEN else uuid.uuid4().hex}"


def says(name: str) -> str | None:
    """A line for who reads samples of a name as a stream; None if it names all of them."""
    if not name.startswith(_ITERABLE):
        return None
    return (
        f"{name}: it is known by its first {_STREAM_SAMPLES:,} samples; whether those after them are the same where a "
        "run continues is not checked"
    )


def _class_of(value: Any) -> str | None:
    """The name of the class of a dataset, without an import of its package; None if it is something else."""
    known = {
        ("pandas", "DataFrame"),
        *(("datasets", name) for name in ("Dataset", "IterableDataset", "DatasetDict", "IterableDatasetDict")),
    }
    classes = ((kind.__module__.partition(".")[0], kind.__name__) for kind in type(value).__mro__)
    return next((name for package, name in classes if (package, name) in known), None)
