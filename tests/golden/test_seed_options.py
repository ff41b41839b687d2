"""Each option of the toolkits that users come from has a key here, or a reason, and a test that shows its effect.

The table, seed_coverage.csv, has a row for each option, rule and example named in their documents. Its column `jaxtune`
lists keys, or key=value if a value is meant: those that the translation of a file really sets.
"""

import ast
import csv
import functools
import hashlib
import json
import pathlib
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from test_foreign_options import EVALUATED, LEAST, SPLIT, TOGETHER, options, promises

from jaxtune.config import foreign, from_json, keys
from jaxtune.config.foreign import ForeignOption
from jaxtune.config.yaml_file import YamlFile

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


# Values that a row names and that neither the tables nor test_foreign_options have: by option.
MORE: dict[str, dict[str, list[Any]]] = {
    "surogate": {
        "agent_template": ["hermes"],
        "datasets.system_prompt_type": ["fixed", "field"],
        "master_dtype": ["fp32"],
        "sample_packing": [False],
    },
    "xorl": {
        "data.val_set_size": [100],
        "train.load_checkpoint_path": ["other/run"],
        "train.optimizer": ["anyprecision_adamw", "adamw"],
    },
    "erniekit": {
        "eval_dataset_prob": ["0.5,0.5,0"],
        "evaluation_strategy": ["steps", "epoch"],
        "learning_rate": [1e-3],
        "save_strategy": ["steps", "epoch", "no"],
        "train_dataset_prob": ["0.5,0.5"],
        "weight_quantize_algo": ["weight_only_mix"],
    },
    "qefficient": {
        "dataset.tokenizer_name": ["other"],
        "scheduler.warmup_steps": [5],
        "training.eval_strategy": ["steps", "epoch"],
        "training.save_strategy": ["steps", "epoch", "no"],
    },
}
# Files in which an option has the effect that its row names, in addition to those of test_foreign_options.
FILES: dict[str, dict[str, list[dict[str, Any]]]] = {
    "xorl": {
        "model.model_path": [{"model.config_path": "x"}],
        "model.config_path": [{"model.config_path": "x"}],
    },
    "erniekit": {
        "eval_dataset_path": [EVALUATED],
        "evaluation_strategy": [{**EVALUATED, "eval_steps": 7}],
        "fp16_opt_level": [{"bf16": False, "fp16": True, "fp16_opt_level": "O2"}],
    },
    "qefficient": {
        "training.do_eval": [{**SPLIT, "dataset.test_split": "some"}],
        "training.eval_strategy": [{"training.eval_steps": 7}],
        "training.save_strategy": [{"training.save_steps": 7}],
    },
}


def variants(dialect: str, entries: str, name: str, row: ForeignOption) -> Iterator[list[dict[str, Any]]]:
    """Yield files that differ in the value of one option only: each value, its default, and none."""
    full = f"{entries}.{name}" if entries else name
    least, values = LEAST[dialect], list(MORE.get(dialect, {}).get(full, ()))
    if row.entries:
        yield [{**least, name: [{"path": "a/b"}]}, {key: value for key, value in least.items() if key != name}]
        return
    values += [] if row.default is ForeignOption().default else [row.default]
    values += [True, False] if isinstance(row.sample, bool) else []
    for file in (TOGETHER[dialect].get(full, ({},))[0], *FILES.get(dialect, {}).get(full, ())):
        source = {**least, **file}
        if entries:
            first, *_ = source.get(entries) or next(value for value in least.values() if isinstance(value, list))
            sources = [{**source, entries: [{**first, name: value}]} for value in values]
            yield [{**source, entries: [first]}, {**source, entries: [{**first, name: None}]}, *sources]
        else:
            without = {key: value for key, value in source.items() if key != name}
            yield [source, without, *({**without, name: value} for value in values)]


def settings_of(dialect: str, source: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the settings of a file, those of entries as lists of the entries' values; None if it has a problem."""
    translation = foreign.translate(YamlFile(dict(source), {}), dialect)
    settings: dict[str, Any] = {}
    for key, value in {**translation.defaults, **translation.stated}.items():
        if keys.has_entries(key):
            for name, inner in ((name, inner) for entry in value or () for name, inner in entry.items()):
                settings.setdefault(f"{key}[i].{name}", []).append(inner)
        settings[key] = value
    return None if translation.problems else settings


@functools.cache
def derive(dialect: str, entries: str, name: str) -> dict[str, list[Any]]:
    """Return the keys that a value of an option sets, and their values."""
    row = foreign.table(dialect)[entries].of[name] if entries else foreign.table(dialect)[name]
    of = foreign.table(dialect)[entries].entries if entries else ""
    found: dict[str, list[Any]] = defaultdict(list)
    if row.key or row.values:  # test_an_option_becomes_what_its_row_promises shows that they do
        for value, settings in promises(row, f"{of}[i].{row.keys[0]}" if of else row.keys[0]):
            for key, setting in settings.items():
                found[f"{of}[i].{key}" if of else key].append(setting)
            for key in row.keys if row.others or not row.values else ():
                found[f"{of}[i].{key}" if of else key] += [value, *MORE.get(dialect, {}).get(name, ())]
    for files in () if row.key or row.values else variants(dialect, entries, name, row):
        translated = [settings for file in files if (settings := settings_of(dialect, file)) is not None]
        # Where others need the option, a file without it is one without them too.
        if len(translated) == 1 and (settings := settings_of(dialect, LEAST[dialect])) is not None:
            translated.append(settings)
        for key in {key for settings in translated for key in settings}:
            values = [settings[key] for settings in translated if key in settings]
            if len(values) < len(translated) or any(value != values[0] for value in values):
                found[key] += [one for value in values for one in (value if isinstance(value, list) else [value])]
    return found


def derived(seed: str, option: str) -> dict[str, list[Any]] | None:
    """Return the keys that an option of a row sets, in whichever section it is; None if it is not an option."""
    dialect = seed.removesuffix("_modes")
    found: dict[str, list[Any]] = defaultdict(list)
    rows = [(entries, name) for entries, name, _ in options(dialect) if option in (name, name.rpartition(".")[2])]
    rows = rows or [(entries, name) for entries, name, _ in options(dialect) if f".{option}." in name]
    for entries, name in rows:
        for key, values in derive(dialect, entries, name).items():
            found[key] += values
    return found if rows else None


DERIVED = [
    pytest.param(row, id=f"{row['seed']} {row['section']}: {row['option']}")
    for row in READ
    if " " not in row["option"] and derived(row["seed"], row["option"]) is not None
]


@pytest.mark.parametrize("row", DERIVED)
def test_the_keys_of_an_option_are_those_that_the_translation_sets(row):
    found = derived(row["seed"], row["option"])
    assert found is not None
    for entry in row["jaxtune"].split():
        key, _, text = entry.partition("=")
        assert key in found, f"{row['option']} sets {sorted(found) or 'nothing'}, not {key}"
        if text:
            value = json.loads(text) if text in ("true", "false") or not text[0].isalpha() else text
            assert value in found[key], (key, found[key])
    assert row["jaxtune"] or not found, f"no key is named, but it sets {sorted(found)}"


def test_most_rows_are_derived():
    assert len(DERIVED) > 470


# A key of ours in a text, such as train.max_steps, data.datasets[i].path, or several as memory.offload_*.
KEY = re.compile(r"(?<![\w./<])([a-z]+(?:\[i\])?(?:\.[a-z_0-9]+(?:\[i\])?)+)(\*)?(?![\w/])")
SECTIONS = {key.partition(".")[0] for key in keys.options()}
# Names of Python modules and files that look like keys.
NO_KEYS = {"train.py", "data.py", "config.json", "export.py"}


def texts() -> Iterator[tuple[str, str]]:
    """Yield (place, text) for each reason and note of the tables and of this table, and each error of a conversion."""
    for dialect in foreign.DIALECTS:
        for entries, name, row in options(dialect):
            yield f"{dialect} {entries} {name}", f"{row.reason} {row.note} {row.later}"
    for row in READ:
        yield f"{row['seed']} {row['option']}", row["note"]
    for file in (ROOT / "jaxtune" / "config" / "foreign").glob("*.py"):
        tree = ast.parse(file.read_text())
        documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
        documents = {ast.get_docstring(node, clean=False) for node in ast.walk(tree) if isinstance(node, documented)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value not in documents:
                yield f"{file.name}, line {node.lineno}", node.value


def test_every_option_that_a_text_names_exists():
    theirs = {name for dialect in foreign.DIALECTS for name in foreign.table(dialect)}
    known = {*keys.options(), *theirs, *NO_KEYS}
    for place, text in texts():
        for key, several in KEY.findall(text):
            if key.partition(".")[0] not in SECTIONS or key in known:
                continue
            prefix = key if several or text[text.index(key) + len(key) :].startswith("...") else f"{key}."
            assert any(name.startswith(prefix) for name in known), f"{place}: no option {key}: {text}"
