"""`python -m jaxtune.options` and `jaxtune COMMAND`: finding options and commands."""

import re
import subprocess
import sys

import pytest

from jaxtune import __main__ as jaxtune_main
from jaxtune import options
from jaxtune.config import keys


def test_every_option_is_listed_with_type_default_unit_rules_and_meaning(capsys):
    assert options.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    listed = [key for key in keys.options() if not key.startswith("data.eval_datasets[i].")]  # as of data.datasets[i]
    assert [line.split("\t")[0] for line in lines] == listed
    assert "data.seq_len\tint\t2048\ttokens\tat least 2\t\ttokens in a row" in lines
    momentum = next(line.split("\t") for line in lines if line.startswith("optim.muon.momentum\t"))
    assert momentum[4:6] == ["at least 0 and below 1", "optim.name == 'muon'"]
    recipes = "'bf16' | 'fp32' | 'fp16' | 'fp8_hybrid' | 'nvfp4'"
    assert any(line.startswith(f"precision.recipe\t{recipes}\t'bf16'\t") for line in lines)


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
    listed = [line.split("\t")[0] for line in capsys.readouterr().out.splitlines()]
    assert shown in listed and hidden not in listed


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["lerning_rate"], "nearest: optim.learning_rate"),
        (["("], "not a regular expression"),
        (["a", "b"], "one pattern at most"),
    ],
)
def test_wrong_pattern(capsys, arguments, part):
    assert options.main(arguments) == 2
    assert part in capsys.readouterr().err


def test_terminal_gets_a_table_with_the_brackets_of_keys(capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "200")
    assert options.main(["glob"]) == 0
    assert "data.eval_datasets[i].glob" in capsys.readouterr().out
    assert options.main([]) == 0
    shown = capsys.readouterr().out
    assert "data.datasets[i].glob" in shown and "data.eval_datasets[i].glob" not in shown


def test_commands_are_dispatched(capsys):
    assert jaxtune_main.main(["options", "seq_len"]) == 0
    assert capsys.readouterr().out.startswith("data.seq_len\t")
    assert jaxtune_main.main(["optoins"]) == 2
    assert "nearest: options" in capsys.readouterr().err


def test_commands_are_listed_with_their_meaning_without_loading_jax():
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "jaxtune"], capture_output=True, text=True, check=True
    )
    for name in jaxtune_main.COMMANDS:
        assert re.search(rf"^  {name} +\w.{{10}}", done.stdout, re.MULTILINE), name
    assert "| jax\n" not in done.stderr
