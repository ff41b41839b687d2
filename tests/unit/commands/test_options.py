"""`python -m jaxtune.options` and `jaxtune COMMAND`: finding options and commands."""

import json
import re
import subprocess
import sys

import jsonschema
import pytest

from jaxtune import __main__ as jaxtune_main
from jaxtune import command, options
from jaxtune.config import keys, to_json
from jaxtune.config.schema import Config


def keys_of(lines: list[str]) -> list[str]:
    """Return the options that are shown, each on a line without indentation."""
    return [key for key, colon, _ in (line.partition(": ") for line in lines) if colon and not key.startswith(" ")]


def test_every_option_is_listed_with_type_default_unit_rules_and_meaning(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert options.main(["--all"]) == 0
    lines = capsys.readouterr().out.splitlines()
    listed = [key for key in keys.options() if not key.startswith("data.eval_datasets[i].")]  # same as data.datasets[i]
    assert keys_of(lines) == listed
    assert lines[-1] == "data.eval_datasets[i] has the options of data.datasets[i]."
    at = lines.index("data.seq_len: int = 2048 (tokens, at least 2)")
    assert lines[at + 1].startswith("    tokens in a row")
    at = lines.index("optim.muon.momentum: float = 0.95 (at least 0 and below 1)")
    assert lines[at + 2] == "    only when optim.name == 'muon'"
    assert "precision.recipe: 'bf16' | 'fp32' | 'fp16' | 'fp8_hybrid' | 'nvfp4' = 'bf16'" in lines
    assert max(map(len, lines)) <= 100 and not any("\t" in line for line in lines)


def test_the_basic_options_come_first_and_the_others_are_named(capsys):
    assert options.main([]) == 0
    *lines, _, last = capsys.readouterr().out.splitlines()
    listed = keys_of(lines)
    assert 50 <= len(listed) <= 80 and {"model.path", "optim.learning_rate", "lora.rank"} <= set(listed)
    assert "optim.muon.momentum" not in listed
    assert (
        last == f"These are the basic options of {len(keys.options())}; --all lists all of them, PATTERN searches them."
    )


def test_the_json_schema_accepts_what_loading_accepts(capsys):
    """By the rules of a recipe: names, types, ranges and allowed values."""
    assert options.main(["--json-schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    defaults = json.loads(to_json(Config()))
    assert not list(validator.iter_errors(defaults))
    good = {"base": "qwen_lora:MODEL", "optim.learning_rate": 1e-4, "data": {"datasets": [{"path": "a.jsonl"}]}}
    assert validator.is_valid(good) and validator.is_valid({"data": {"datasets": "a.jsonl"}})
    for bad in (
        {"optim": {"lerning_rate": 1e-4}},
        {"lora": {"rank": "8"}},
        {"lora": {"rank": 0}},
        {"precision": {"recipe": "fp7"}},
        {"data": {"datasets": [{"pth": "a.jsonl"}]}},
    ):
        assert not validator.is_valid(bad), bad


@pytest.mark.parametrize(
    ("pattern", "shown", "hidden"),
    [
        (r"^optim\.", "optim.schedule", "train.seed"),
        ("WARM", "optim.warmup_steps", "train.seed"),
        ("held out", "data.validation_split", "train.seed"),
    ],
)
def test_pattern_over_keys_and_meanings(capsys, pattern, shown, hidden):
    assert options.main([pattern]) == 0
    listed = keys_of(capsys.readouterr().out.splitlines())
    assert shown in listed and hidden not in listed


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["lerning_rate"], "nearest: optim.learning_rate"),
        (["("], "not a regular expression"),
        (["a", "b"], "one pattern at most"),
        (["--al"], "--al: no such flag"),
    ],
)
def test_wrong_pattern(capsys, arguments, part):
    assert options.main(arguments) == 2
    assert part in capsys.readouterr().err


def test_lines_are_as_wide_as_the_terminal_and_options_of_a_pattern_are_in_both_lists(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    assert options.main([r"\.glob"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert keys_of(shown) == ["data.datasets[i].glob", "data.eval_datasets[i].glob"]
    assert 50 < max(map(len, shown)) <= 60


def test_commands_are_dispatched(capsys):
    assert jaxtune_main.main(["options", "seq_len"]) == 0
    assert capsys.readouterr().out.startswith("data.seq_len: ")
    assert jaxtune_main.main(["optoins"]) == 2
    assert "nearest: options" in capsys.readouterr().err


def test_commands_are_listed_with_their_meaning_without_loading_jax():
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "jaxtune"], capture_output=True, text=True, check=True
    )
    for name in command.NAMES:
        assert re.search(rf"^  {name} +\w.{{10}}", done.stdout, re.MULTILINE), name
    assert "| jax\n" not in done.stderr
