"""The translation of each system's example config, option by option, and the options whose defaults differ from ours.

After an intended change: `pytest tests/golden --regenerate`, then read the diff of tests/golden/foreign/.
"""

import json
import pathlib

import pytest

from jaxtune.config import foreign, keys, load_recipe, read_recipe
from jaxtune.config.option_rules import every_option
from jaxtune.config.sources.yaml_file import YamlFile

HERE = pathlib.Path(__file__).parent
EXAMPLES = HERE / "foreign"


def record(path: pathlib.Path) -> str:
    """Return the log lines about a config, and its changed options, as text."""
    config = read_recipe(path.name).resolve()
    changed = [
        f"{key} = {json.dumps(value)}"
        for key, option, section in every_option(config)
        if (value := getattr(section, option.key.rpartition(".")[2])) != option.default and not keys.has_entries(key)
    ]
    return "\n".join([*config.startup_notes, "", *changed, ""])


@pytest.mark.parametrize("dialect", foreign.DIALECTS)
def test_an_example_becomes_what_is_on_record(dialect, monkeypatch, request):
    monkeypatch.chdir(EXAMPLES)
    text = record(pathlib.Path(f"{dialect}.yaml"))
    golden = EXAMPLES / f"{dialect}.txt"
    if request.config.getoption("--regenerate", default=False):
        golden.write_text(text)
    assert text == golden.read_text()


@pytest.mark.parametrize("dialect", foreign.DIALECTS)
def test_what_is_loaded_without_being_resolved_is_the_same(dialect, monkeypatch):
    monkeypatch.chdir(EXAMPLES)
    assert (
        load_recipe(f"{dialect}.yaml").optim.learning_rate
        == read_recipe(f"{dialect}.yaml").resolve().optim.learning_rate
    )


def rows(table, prefix=""):
    for name, row in table.items():
        yield name, row, prefix
        yield from rows(row.of, "data.datasets[i].")


@pytest.mark.parametrize("dialect", foreign.DIALECTS)
def test_every_row_of_a_table_leads_somewhere(dialect):
    for name, row, prefix in rows(foreign.table(dialect)):
        ways = [bool(row.key or row.values), row.convert, row.entries, row.reason, row.later]
        assert sum(map(bool, ways)) == 1, name
        several = [key for value in row.values.values() if isinstance(value, dict) for key in value]
        keys_here = [f"{prefix}{key}" for key in row.keys if key]
        assert {*keys_here, *several} <= set(keys.options()), name


@pytest.mark.parametrize("dialect", foreign.DIALECTS)
def test_an_option_contradicts_options_of_the_table(dialect):
    for name, row, _ in rows(foreign.table(dialect)):
        others = [*row.not_with, row.same_as] if row.same_as else row.not_with
        assert {*others} <= foreign.table(dialect).keys() - {name}, name


@pytest.mark.parametrize("dialect", foreign.DIALECTS)
def test_any_value_of_an_option_is_translated_or_answered(dialect):
    """No traceback, whatever the value: a word, a list, a section, a number, a switch or nothing."""
    for name, _, prefix in rows(foreign.table(dialect)):
        for value in ("x", [1], ["a"], {"a": 1}, True, -5, 1.5, 0, None, [], {}):
            options = {name: value}
            if prefix:
                of = next(outer for outer, one in foreign.table(dialect).items() if name in one.of)
                options = {of: [{"path": "a", "type": "instruction", name: value}]}
            translation = foreign.translate(YamlFile(options, {}), dialect)
            assert any(line.option.endswith(name) for line in translation.lines), (name, value)
