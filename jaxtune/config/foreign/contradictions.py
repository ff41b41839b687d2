"""Options of a file that contradict each other, and keys that it writes twice."""

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from jaxtune.config.foreign.option_table import ForeignOption, flatten
from jaxtune.config.foreign.translation import Line
from jaxtune.config.sources import yaml_file


def find_contradictions(
    lines: list[Line], written: yaml_file.YamlFile, table: Mapping[str, ForeignOption]
) -> list[Line]:
    """Return an error for each option that contradicts another one, and a note for each key that is written twice."""
    errors = list(_set_twice(lines, written))
    wrong = {line.option for line in (*lines, *errors) if line.wrong}
    return [*errors, *_excluded(written, table, wrong), *_written_twice(written)]


def _set_twice(lines: list[Line], written: yaml_file.YamlFile) -> Iterator[Line]:
    """Yield an error for each option of the file that sets a key otherwise than an earlier one."""
    seen: dict[str, tuple[str, Any]] = {}
    for line in lines:
        for key, value in line.settings.items() if line.stated else ():
            first, before = seen.setdefault(key, (line.option, value))
            if before != value:
                text = f"{first} (line {written.line(first)}) already sets {key} to {before!r}"
                yield _one_too_many(line.option, line.value, text)


def _excluded(
    written: yaml_file.YamlFile, table: Mapping[str, ForeignOption], wrong: Collection[str]
) -> Iterator[Line]:
    """Yield an error for each option of the file that contradicts another one (`not_with`, `same_as`).

    The options `wrong` have an error already.
    """
    flat = flatten(written.values, table).items()
    values = {name: value for name, value in flat if value and value != "auto" and name not in wrong}
    for name, row in table.items():
        differs = row.same_as and values.get(name) != values.get(row.same_as)
        for other in (*row.not_with, row.same_as) if differs else row.not_with:
            if name in values and other in values:
                text = f"contradicts {other} = {values[other]!r} (line {written.line(other)})"
                yield _one_too_many(name, values[name], text)


def _one_too_many(option: str, value: Any, text: str) -> Line:
    return Line(option, value, True, {}, text, remedy=f"remove one of the two, such as {option}")


def _written_twice(written: yaml_file.YamlFile) -> Iterator[Line]:
    """Yield a note for each key that is written twice: PyYAML, with which these systems read files, takes the last."""
    for name, (first, last) in written.repeated.items():
        value: Any = written.values
        for part in re.findall(r"[^.\[\]]+", name):
            value = (
                value[int(part)] if isinstance(value, list) else value.get(part) if isinstance(value, dict) else None
            )
        yield Line(name, value, True, {}, f"written twice, in lines {first} and {last}; the last counts")
