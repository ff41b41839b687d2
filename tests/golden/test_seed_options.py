"""Each option of the toolkits that users come from has a key here, or a reason, and a test that shows its effect.

The table, seed_coverage.csv, has a row for each option, rule and example named in their documents. Its column `jaxtune`
lists keys, or key=value if a value is meant.
"""

import ast
import csv
import functools
import hashlib
import json
import pathlib
from collections import Counter

import pytest

from jaxtune.config import foreign, from_json, keys

ROOT = pathlib.Path(__file__).parents[2]
TABLE = ROOT / "tests" / "golden" / "seed_coverage.csv"
COLUMNS = ["seed", "section", "option", "category", "jaxtune", "note", "test"]
# Rows by document, and a digest of their names in order; surogate_modes: Surogate's page of training modes.
DOCUMENTS = {"surogate": 153, "surogate_modes": 17, "xorl": 150, "erniekit": 116, "qefficient": 110}
DIGEST = "07edfea340fcf888"
READ = list(csv.DictReader(TABLE.open(encoding="utf-8")))
ROWS = [pytest.param(row, id=f"{row['seed']} {row['section']}: {row['option']}") for row in READ]


@functools.cache
def functions(file: str) -> set[str]:
    """Return the test functions of a file."""
    return {node.name for node in ast.parse((ROOT / file).read_text()).body if isinstance(node, ast.FunctionDef)}


def test_no_row_is_missing_or_there_twice():
    assert list(READ[0]) == COLUMNS and all(None not in row and None not in row.values() for row in READ)
    names = [(row["seed"], row["section"], row["option"]) for row in READ]
    assert Counter(seed for seed, _, _ in names) == DOCUMENTS
    assert len(set(names)) == len(names)
    assert hashlib.sha256(json.dumps(names).encode()).hexdigest()[:16] == DIGEST


@pytest.mark.parametrize("row", ROWS)
def test_the_keys_exist_and_take_these_values(row):
    for entry in row["jaxtune"].split():
        key, _, text = entry.partition("=")
        assert key in keys.options(), key
        if text:
            value = json.loads(text) if text in ("true", "false") or not text[0].isalpha() else text
            for name in reversed(key.split(".")):
                value = {name: value} if "[i]" not in name else {name.removesuffix("[i]"): [value]}
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


@pytest.mark.parametrize("dialect", [name for name in foreign.DIALECTS if name in DOCUMENTS])
def test_rows_are_options_of_the_table_of_their_system(dialect):
    """All rows except rules, examples, command lines, and recipe names that a page compares."""
    known = {part for name, row in foreign.table(dialect).items() for part in (*name.split("."), *row.of)}
    named = [row["option"] for row in READ if row["seed"] == dialect and row["section"] != "Recipe Comparison"]
    named = [option.split(".")[-1] for option in named if " " not in option]
    assert set(named) - known <= {"XORL_DATASET_NUM_PROC"} and len(named) > 60
