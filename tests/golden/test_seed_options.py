"""Each option of the toolkits whose users come here has a key here, or a reason, and a test that shows its effect.

A table is a file `seed_<categories>.csv`. Its column `jaxtune` lists keys, or key=value where a value is meant.
"""

import ast
import csv
import functools
import json
import pathlib
from collections import Counter

import pytest

from jaxtune.config import from_json, keys

ROOT = pathlib.Path(__file__).parents[2]
# Of data, where it comes from and its form; of parallelism and memory, and of starting a run, all.
TABLES = {
    "seed_precision_optim": {"surogate": 25, "xorl": 21, "erniekit": 24, "qefficient": 10},
    "seed_chat": {"surogate": 6},
    "seed_preference": {"erniekit": 14},
    "seed_packing": {"surogate": 4, "xorl": 4, "erniekit": 1, "qefficient": 4},
    "seed_load": {"surogate": 1, "xorl": 7, "erniekit": 2, "qefficient": 3},
    "seed_data": {"surogate": 8, "xorl": 12, "erniekit": 6, "qefficient": 8},
    "seed_model": {"surogate": 6, "xorl": 6, "erniekit": 4, "qefficient": 4},
    "seed_parallel_memory": {"surogate": 21, "xorl": 22, "erniekit": 12, "qefficient": 5},
}
COLUMNS = ["seed", "section", "option", "category", "jaxtune", "note", "test"]
ROWS = [
    pytest.param(row, id=f"{row['seed']} {row['option']}")
    for table in TABLES
    for row in csv.DictReader((ROOT / "tests" / "golden" / f"{table}.csv").open())
]


@functools.cache
def functions(file: str) -> set[str]:
    """Test functions of a file."""
    return {node.name for node in ast.parse((ROOT / file).read_text()).body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("row", ROWS)
def test_the_keys_exist_and_take_these_values(row):
    for entry in row["jaxtune"].split():
        key, _, text = entry.partition("=")
        assert key in keys.options(), key
        if text:
            value = text if text[0].isalpha() else json.loads(text)
            for name in reversed(key.split(".")):
                value = {name: value}
            from_json(json.dumps(value))


@pytest.mark.parametrize("row", ROWS)
def test_an_option_without_a_key_has_a_reason(row):
    assert row["jaxtune"] or row["note"]


@pytest.mark.parametrize("row", ROWS)
def test_a_test_shows_the_effect(row):
    assert row["test"]
    for node in row["test"].split():
        file, _, function = node.partition("::")
        assert function.startswith("test_") and function in functions(file), node


@pytest.mark.parametrize("table", TABLES)
def test_every_option_is_listed_once(table):
    with (ROOT / "tests" / "golden" / f"{table}.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == COLUMNS and all(None not in row and None not in row.values() for row in rows)
    assert Counter(row["seed"] for row in rows) == TABLES[table]
    assert len({(row["seed"], row["section"], row["option"]) for row in rows}) == len(rows)
