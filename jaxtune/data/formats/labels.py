"""Labels of documents: collect their names from the data, and return the number of a sample's label."""

import itertools
import math
from collections.abc import Mapping
from typing import Any, Literal

from jaxtune.config.schema import Dataset
from jaxtune.data.chat.messages import clip
from jaxtune.data.reading import sources
from jaxtune.errors import UserError


def label_number(sample: Mapping[str, Any], column: str, names: tuple[str, ...]) -> float:
    """Return the number of a sample's label; with only one name, the target value of the regression.

    A label is a name, or a number, which a CSV file holds as text. Raises UserError for anything else.
    """
    label = _label(sample, column)
    if len(names) == 1:
        return _value(label, column)
    if label in names:
        return names.index(label)
    number = int(label) if isinstance(label, str) and label.isdecimal() else label
    if isinstance(number, int) and 0 <= number < len(names):
        return number
    known = ", ".join(names[:10]) + (", ..." if len(names) > 10 else "")
    raise UserError(f"column {column!r}: {clip(repr(label))} is not one of the {len(names)} labels: {known}")


def _label(sample: Mapping[str, Any], column: str) -> str | int | float:
    if column not in sample:
        raise UserError(f"missing column {column!r} (target_column); it has {', '.join(sample) or 'none'}")
    label = sample[column]
    if isinstance(label, list | tuple):
        raise UserError(f"column {column!r}: {clip(repr(label))}: several labels of a sample are not supported")
    if isinstance(label, bool) or not isinstance(label, str | int | float):  # a bool is an int to Python
        raise UserError(f"column {column!r} must be the name or the number of a label, found {clip(repr(label))}")
    return label


def _value(label: str | float, column: str) -> float:
    try:
        value = float(label)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise UserError(f"column {column!r} must be a finite number, found {clip(repr(label))}")
    return value


def read_label_names(
    entries: tuple[Dataset, ...], count: int | None = None, on_bad_row: Literal["error", "skip"] = "error"
) -> tuple[str, ...]:
    """Return the names of the labels in the data, by number: texts are sorted; integers become LABEL_0, LABEL_1, ...

    Args:
        entries: the training data; all samples are read.
        count: the required number of labels; integer labels below it need not occur. None: as many as occur.
        on_bad_row: data.on_bad_row.

    Raises:
        UserError: with file and line: a sample without a label, a mixture of numbers and texts, or integers that do not
            count from 0; without: there are fewer than two labels, or not `count`.
    """
    places: dict[str | int, str] = {}  # the place of the first sample of each label

    def report(error: UserError):
        if on_bad_row == "error":
            raise error

    for entry in entries:
        for where, sample in sources.open_source(entry).read(report):
            try:
                label = _label(sample, entry.target_column)
                if isinstance(label, float):
                    raise UserError(f"label {label!r} is not an integer; model.num_labels=1 is regression")
                places.setdefault(label, where)
            except UserError as error:
                report(UserError(f"{where}: {error}"))
    texts = sorted(label for label in places if isinstance(label, str))
    numbers = sorted(label for label in places if isinstance(label, int))
    if texts and numbers:
        text, number = texts[0], numbers[0]
        raise UserError(f"{places[number]}: label {number} is a number, but {text!r} at {places[text]} is text")
    if len(places) < 2 and count is None:
        raise UserError(
            f"data: all samples have the same label, {next(iter(places), None)!r}; for regression set "
            "model.num_labels=1"
        )
    if numbers:
        return tuple(f"LABEL_{number}" for number in range(count or _count_labels(numbers, places)))
    if count not in (None, len(texts)):
        raise UserError(f"model.num_labels={count}, but the data has {len(texts)} labels: {clip(', '.join(texts))}")
    return tuple(sorted(texts, key=int) if all(text.isdecimal() for text in texts) else texts)  # "10" after "9"


def _count_labels(numbers: list[int], places: Mapping[Any, str]) -> int:
    """Return the number of labels. Raises UserError unless they count from 0 without a gap."""
    missing = next(number for number in itertools.count() if number not in places)  # the first gap
    if missing < len(numbers):
        stray = next(number for number in numbers if number < 0 or number > missing)
        raise UserError(
            f"{places[stray]}: label {stray}, but no sample has label {missing}: integers count from 0 without a gap; "
            "give model.num_labels if some do not occur, or texts as labels"
        )
    return missing
