"""Datasets passed from Python code. A config holds their names, which contain a fingerprint of the samples."""

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
"""Prefix of the names, which are used as the path of an entry of data.datasets."""

_ITERABLE = f"{PREFIX}IterableDataset-"
_STREAM_SAMPLES = 1000  # samples in the fingerprint of an IterableDataset, which may be infinite


@dataclass(frozen=True)
class _Entry:
    """A registered dataset.

    Attributes:
        samples: The dataset, without a format.
        objects: Objects registered under this name, the latest last.
        token: Identifies the latest object.
    """

    samples: Any
    objects: tuple[Any, ...]
    token: str


_REGISTRY: dict[str, _Entry] = {}


def _without_decoding(samples: Any) -> Any:
    """Return a dataset whose images are {bytes, path}: pictures would be decoded for each sample, and have no hash."""
    if samples.features is None:  # an IterableDataset may not know them
        return samples
    if hasattr(samples, "decode"):  # an IterableDataset
        return samples.decode(False)
    from datasets import Image

    def without_decoding(feature: Any) -> Any:
        if isinstance(feature, Image):
            return Image(decode=False)
        inner = getattr(feature, "feature", None)  # of a list
        return type(feature)(without_decoding(inner)) if isinstance(inner, Image) else feature

    for name, feature in samples.features.items():
        if without_decoding(feature) is not feature:
            samples = samples.cast_column(name, without_decoding(feature))
    return samples


def is_dataset(value: Any) -> bool:
    """Whether a value has a class that `add` accepts, or is a collection of such datasets."""
    return _class_of(value) is not None


def add(value: Any) -> str:
    """Register a datasets.Dataset, IterableDataset or pandas DataFrame, and return its name.

    Equal samples have the same name in every process; for an IterableDataset, only the first 1000 samples count.

    Raises:
        UserError: The value is a collection of several splits.
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
        raise UserError(f"a {kind} has several splits: pass one split, such as data[{next(iter(value))!r}]")
    # Plain Python values: a torch or numpy format would change the fingerprint.
    samples = _without_decoding(value.with_format(None))
    digest = hashlib.sha256()
    for sample in itertools.islice(samples, _STREAM_SAMPLES) if kind == "IterableDataset" else samples:
        digest.update(json.dumps(sample, default=str).encode())  # str: dates, for example
    name = f"{PREFIX}{kind}-{digest.hexdigest()[:16]}"  # 64 bits of the hash
    before = _REGISTRY.get(name, _Entry(None, (), ""))
    # Another object with the same name needs a new token, so that no cache of the earlier one is used for it.
    if not before.objects or before.objects[-1] is not value:
        # Only a stream keeps earlier objects: the name of another dataset is a fingerprint of all its samples.
        earlier = tuple(one for one in before.objects if one is not value) if name.startswith(_ITERABLE) else ()
        _REGISTRY[name] = _Entry(samples, (*earlier, value), uuid.uuid4().hex)
    return name


def refuse_ambiguous(names: Iterable[Any]) -> None:
    """Raise UserError if two entries of a config have the same name but were different IterableDatasets."""
    for name, count in Counter(name for name in names if isinstance(name, str)).items():
        if count > 1 and name.startswith(_ITERABLE) and name in _REGISTRY and len(_REGISTRY[name].objects) > 1:
            raise UserError(
                f"data: two IterableDatasets begin with the same {_STREAM_SAMPLES:,} samples, which identify them; "
                "pass the same object twice, skip samples of one, or write one to a file"
            )


def find(name: str) -> Any:
    """Return the dataset with this name. Raises UserError if it was not registered in this process."""
    if name not in _REGISTRY:
        raise UserError(
            f"data: {name} was given from Python, and this process does not have it: start the run again from Python "
            "with the same dataset, or write it to a file for a new run"
        )
    return _REGISTRY[name].samples


def identity(name: str, streaming: bool) -> str:
    """Return a text that differs whenever the samples of a name may have changed."""
    # IterableDatasets may differ after the samples in the fingerprint, so the cache must not confuse two of them. A
    # stream has no cache.
    if not name.startswith(_ITERABLE) or streaming:
        return name
    return f"{name} {_REGISTRY[name].token if name in _REGISTRY else uuid.uuid4().hex}"


def stream_note(name: str) -> str | None:
    """Return a note for streaming this dataset; None if its name covers every sample."""
    if not name.startswith(_ITERABLE):
        return None
    return (
        f"{name}: only its first {_STREAM_SAMPLES:,} samples are compared when a run continues; later samples are not "
        "checked"
    )


def _class_of(value: Any) -> str | None:
    """Return the name of a dataset's class, without importing its package; None for other values."""
    known = {
        ("pandas", "DataFrame"),
        *(("datasets", name) for name in ("Dataset", "IterableDataset", "DatasetDict", "IterableDatasetDict")),
    }
    classes = ((kind.__module__.partition(".")[0], kind.__name__) for kind in type(value).__mro__)  # subclasses too
    return next((name for package, name in classes if (package, name) in known), None)
