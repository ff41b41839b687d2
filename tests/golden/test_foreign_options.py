"""Every option of the tables, with every value in its row, is translated as the row says.

Each option is written to a small file of its system, with the options it needs to have an effect there, and resolved.
"""

import json
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import pytest
from golden.foreign_tables import IN_ENTRY, INSTEAD, SYSTEMS
from golden.foreign_tables.option_values import options, promises

from jaxtune.config import foreign, read_recipe
from jaxtune.config.foreign import ForeignOption
from jaxtune.config.schema import Config
from jaxtune.config.sources.yaml_file import YamlFile

# Options that are needed here and that their files cannot set.
TYPED = {
    "offset_alpha": [(f"data.datasets[0].{side}_score_field", side) for side in ("chosen", "rejected")],
    "init_projections_to_zero": [("model.from_scratch", "true")],
}
ALONE = [
    pytest.param(dialect, entries, name, row, id=f"{dialect} {entries and f'{entries}.'}{name}")
    for dialect in foreign.DIALECTS
    for entries, name, row in options(dialect)
    if row.key or row.values
]


def value_of(config: Config, key: str) -> Any:
    value: Any = config
    for part in re.sub(r"\[(\d)\]", r".\1", key.replace("[i]", "[0]")).split("."):
        value = value[int(part)] if part.isdigit() else getattr(value, part)
    return value


def becomes(dialect: str, source: Mapping[str, Any], expected: Mapping[str, Any], folder: pathlib.Path) -> None:
    file = folder / "its.yaml"
    file.write_text(json.dumps(source))
    overrides = [override for option in source for override in TYPED.get(option, ())]
    config = read_recipe(str(file), dialect=dialect).resolve(overrides)
    assert {key: value_of(config, key) for key in expected} == expected


@pytest.mark.parametrize(("dialect", "entries", "name", "row"), ALONE)
def test_an_option_becomes_what_its_row_promises(dialect, entries, name, row, tmp_path):
    of = foreign.table(dialect)[entries].entries if entries else ""
    key = f"{of}[i].{row.keys[0]}" if of else row.keys[0]
    for value, settings in promises(row, key):
        source: dict[str, Any] = dict(SYSTEMS[dialect].LEAST)
        for prefix, more in SYSTEMS[dialect].BESIDE.items():
            if name.startswith(prefix) or key.startswith(prefix):
                source |= more
        if entries:
            instead = INSTEAD.get((dialect, entries))
            first = (
                source.pop(instead) if instead else next(value for value in source.values() if isinstance(value, list))
            )
            path = next(iter(foreign.table(dialect)[entries].of))  # path, or id
            first = first[0] if isinstance(first, list) and not instead else {path: "a/b"}
            source[entries] = [{**first, **IN_ENTRY.get(name, {}), name: value}]
        else:
            source[name] = value
        becomes(dialect, source, {f"{of}[0].{key}" if of else key: here for key, here in settings.items()}, tmp_path)


def read_together(dialect: str) -> set[str]:
    return {f"{entries and f'{entries}.'}{name}" for entries, name, row in options(dialect) if row.convert}


@pytest.mark.parametrize("dialect", foreign.DIALECTS)
def test_each_option_that_is_read_with_others_is_here(dialect):
    assert SYSTEMS[dialect].TOGETHER.keys() == read_together(dialect)


@pytest.mark.parametrize(
    ("dialect", "option"), [(dialect, option) for dialect, system in SYSTEMS.items() for option in system.TOGETHER]
)
def test_options_that_are_read_together_become_this(dialect, option, tmp_path):
    source, expected = SYSTEMS[dialect].TOGETHER[option]
    becomes(dialect, {**SYSTEMS[dialect].LEAST, **source}, expected, tmp_path)


@pytest.mark.parametrize("dialect", foreign.DIALECTS)
def test_an_option_without_a_meaning_here_is_answered_by_its_reason(dialect):
    for entries, name, row in options(dialect):
        if not row.reason:
            continue
        for value in (row.sample, True, "x"):
            source = {**SYSTEMS[dialect].LEAST, name: value}
            if entries:
                source = {**SYSTEMS[dialect].LEAST, entries: [{"path": "a", "type": "text", name: value}]}
            lines = {line.option: line for line in foreign.translate(YamlFile(source, {}), dialect).lines}
            line = lines[f"{entries}[0].{name}" if entries else name]
            fits = value is row.sample or not line.wrong
            assert (line.text == row.reason and not line.settings) if fits else "expected a value" in line.text, name


@pytest.mark.parametrize("dialect", foreign.DIALECTS)
def test_what_is_not_there_yet_is_an_error_unless_it_is_the_default(dialect):
    for name, row in foreign.table(dialect).items():
        if not row.later:
            continue
        for value in ([row.default] if row.default is not ForeignOption().default else []) + ["another"]:
            translation = foreign.translate(YamlFile({**SYSTEMS[dialect].LEAST, name: value}, {}), dialect)
            (line,) = [line for line in translation.lines if line.option == name]
            assert line.wrong == (value == "another") and not line.settings
            assert [name in problem.keys for problem in translation.problems] == [True] * line.wrong
