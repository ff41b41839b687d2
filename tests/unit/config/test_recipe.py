"""Recipes of jaxtune load by name from any folder, a run's config.json is a recipe, other files are refused."""

import ast
import copy
import json
import operator
import pathlib
import re
import shlex

import pytest

from jaxtune import __main__ as jaxtune
from jaxtune.config import load_recipe, read_recipe, resolve, to_json
from jaxtune.config.recipe import RECIPES, first_line, own_recipes
from jaxtune.config.schema import Dataset
from jaxtune.data.reading.sources import open_source
from jaxtune.errors import UserError
from jaxtune.recipes import qwen_lora


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_a_recipe_goes_by_its_name():
    assert load_recipe("qwen_qlora_nf4", "my/model") == load_recipe(str(RECIPES / "qwen_qlora_nf4.py"), "my/model")


def test_a_recipe_starts_from_another_in_any_folder():
    pathlib.Path("mine.py").write_text(
        "from jaxtune.recipes import qwen_lora\n\n"
        "def get_config():\n"
        "    config = qwen_lora.get_config('my/model')\n"
        "    config.lora.rank = 64\n"
        "    return config\n"
    )
    config = resolve(load_recipe("mine.py"), "mine.py")
    assert (config.model.path, config.lora.rank, config.lora.alpha) == ("my/model", 64, 32.0)


def started_from(base: str, *lines: str) -> str:
    """Write a recipe that imports another one and adds these lines; return its name."""
    body = [f"config = {base}.get_config('my/model')", *lines, "return config"]
    head = f"from jaxtune.config import dataset, new_config\nfrom jaxtune.recipes import {base}\n\ndef get_config():\n"
    pathlib.Path("mine.py").write_text(head + "".join(f"    {line}\n" for line in body))
    return "mine.py"


@pytest.mark.parametrize(
    ("base", "line", "values", "left_out"),
    [
        (
            "qwen_lora",
            "data.eval_datasets = (dataset(path='v'),)",
            {"data.validation_split": 0.0},
            ["validation_split"],
        ),
        ("qwen_lora", "data.validation_split = None", {"eval.steps": 0}, ["steps"]),
        ("qwen_lora", "train.max_steps = 10", {"train.max_steps": 10}, []),
        ("qwen_lora", "lora = new_config().lora", {"lora.enabled": False}, []),
        ("llama_pretrain", "train.epochs = 1", {"train.max_steps": None}, ["max_steps"]),
        ("llama_pretrain", "train.epochs = None", {"train.max_steps": 2000}, []),
        ("llama_pretrain", "optim.warmup_ratio = 0.1", {"optim.warmup_steps": 0}, ["warmup_steps"]),
        ("mix_and_stream", "data.eval_datasets = None", {"eval.steps": 0}, ["steps"]),
        ("qwen_lora", "data.datasets[0].path = 'a'", {"data.datasets": ("a", "auto", None)}, ["type"]),
        ("llama_pretrain", "data.datasets[0].path = 'a'", {"data.datasets": ("a", "auto", None)}, ["type", "subset"]),
    ],
)
def test_what_a_recipe_inherits_gives_way_to_what_it_says(base, line, values, left_out):
    """An inherited option gives way in the same way to the command line and to a call."""
    written = read_recipe(started_from(base, f"config.{line}")).resolve()
    configs = [written]
    key, _, value = line.partition(" = ")
    if "(" not in value:
        configs.append(read_recipe(base, "my/model").resolve([(key, value.strip("'"))]))
        configs.append(read_recipe(base, "my/model").resolve([(key, ast.literal_eval(value))], by="call"))
    for config in configs:
        actual = {key: operator.attrgetter(key)(config) for key in values}
        for entry in actual.get("data.datasets", ()):
            actual["data.datasets"] = (entry.path, entry.type, entry.subset)
        assert actual == values
        assert len(config.startup_notes) == bool(left_out), "one line for all options of a dataset"
        assert [
            name for text in config.startup_notes for name in re.findall(r"(\w+) = ", text.split(": ")[2])
        ] == left_out


def test_columns_of_a_recipe_s_own_dataset_give_way_to_another_path():
    """The options for processing samples stay, and so do typed options."""
    fields = "instruction_field='q', output_field='a', tools_field='t', select_columns=('q', 'a'), encoding='cp1252'"
    more = "message_property_mappings=('role=who',), prompt_format='{q}: ', type='auto', samples=2"
    name = started_from("qwen_lora", f"config.data.datasets = (dataset(path='own.csv', {fields}, {more}),)")
    entry = "data.datasets[0]"
    typed = [(f"{entry}.path", "other.jsonl"), (f"{entry}.output_field", "a")]
    for config in (
        read_recipe(name).resolve(typed),
        read_recipe(name).resolve(typed, by="call"),
    ):
        assert config.data.datasets == (
            Dataset(path="other.jsonl", output_field="a", prompt_format="{q}: ", samples=2),
        )
        gone = ("encoding", "select_columns", "instruction_field", "tools_field", "message_property_mappings")
        (line,) = config.startup_notes
        assert line.startswith(f"left out: recipe: {entry}.encoding = 'cp1252', {entry}.select_columns = ('q', 'a'), ")
        assert re.findall(r"\](\.\w+) = ", line) == [f".{name}" for name in gone]
        assert line.endswith(": describes the dataset that was replaced")
    assert read_recipe(name).resolve().data.datasets[0].instruction_field == "q"


@pytest.mark.parametrize(
    ("base", "lines", "told"),
    [
        ("qwen_full", ["config.lora.rank = 4"], "lora.rank = 4: has no effect"),
        ("qwen_lora", ["config.train.max_steps = 5", "config.train.epochs = 2"], "train.epochs = 2.0: has no effect"),
        (
            "qwen_lora",
            ["config.data.validation_split = 0.1", "config.data.eval_datasets = 'v'"],
            "validation_split = 0.1",
        ),
    ],
)
def test_what_a_recipe_says_itself_must_have_an_effect(base, lines, told):
    with pytest.raises(UserError, match=told):
        read_recipe(started_from(base, *lines)).resolve()


def test_what_is_inherited_gives_way_at_every_step():
    """In a Python recipe, in YAML files based on one another, and in a config that Python code changes."""
    started_from("qwen_lora", "config.data.validation_split = 0.0")
    pathlib.Path("middle.yaml").write_text("base: mine.py\nlora: {rank: 4}\n")
    pathlib.Path("top.yaml").write_text("base: middle.yaml\nlora: {enabled: false}\n")
    config = read_recipe("top.yaml").resolve()
    assert [line.split(" = ")[0] for line in config.startup_notes] == [
        "left out: recipe: lora.rank",
        "left out: recipe: eval.steps",
    ]
    changed = copy.deepcopy(qwen_lora.get_config("my/model"))
    changed.data.eval_datasets = "v.jsonl"
    assert resolve(changed, "notebook").data.validation_split == 0.0
    changed.data.validation_split = 0.1
    with pytest.raises(UserError, match="validation_split = 0.1: has no effect"):
        resolve(changed, "notebook")


def test_a_classifier_keeps_the_type_of_its_data():
    """'auto' never chooses it."""
    type_ = "config.data.datasets[0].type = 'classification'"
    path = started_from("qwen_full", "config.model.head = 'classification'", type_)
    config = read_recipe(path).resolve([("data.datasets[0].path", "mine.csv")])
    assert config.data.datasets[0].type == "classification" and not config.startup_notes


def test_the_config_of_a_run_is_a_recipe():
    config = resolve(load_recipe("qwen_lora", "my/model"), "qwen_lora", [("lora.rank", "4")])
    pathlib.Path("config.json").write_text(to_json(config))
    assert resolve(load_recipe("config.json"), "config.json", [("train.max_steps", "7")]).train.max_steps == 7
    assert resolve(load_recipe("config.json"), "config.json") == config


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        (
            "qwen_lor",
            None,
            r"recipe qwen_lor: no such file; there are own.py; jaxtune has a recipe qwen_lora, which needs no path",
        ),
        ("configs/qwen_lora.py", None, "jaxtune has a recipe qwen_lora, which needs no path"),
        (
            "my_recipe",
            None,
            r"no such file; there are own.py; jaxtune has (\w+, )*llama_pretrain, (\w+, )*quickstart, ",
        ),
        (
            "run.toml",
            "[lora]",
            "run.toml: a recipe is a Python file with get_config.., a YAML file, or the config.json",
        ),
        ("config.json", "{", "config.json: not JSON"),
        (".", None, "recipe .: a folder; if it is a model, train adapters with --config=qwen_lora:."),
        ("runs/one", None, "recipe runs/one: the folder of a run; resume it with --config=runs/one/config.json"),
        ("config.json", json.dumps({"model_type": "qwen3"}), "config.json: it describes a model, not a run"),
    ],
)
def test_what_is_no_recipe_says_what_would_be(name, text, told):
    pathlib.Path("own.py").write_text("def get_config(): ...")
    pathlib.Path("other.py").write_text("import nothing")
    pathlib.Path("config.json").write_text("{}")
    pathlib.Path("runs/one/checkpoints").mkdir(parents=True)
    if text is not None:
        pathlib.Path(name).write_text(text)
    with pytest.raises(UserError, match=told):
        load_recipe(name)


def test_the_command_lists_recipes_and_copies_one(capsys):
    assert jaxtune.main(["recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(own_recipes())
    assert all(
        line.endswith(first_line(file)) and first_line(file) for line, file in zip(lines, own_recipes().values())
    )

    assert jaxtune.main(["recipes", "--copy=qwen_lora"]) == 0
    assert "python -m jaxtune.train --config=qwen_lora.py" in capsys.readouterr().out
    assert load_recipe("qwen_lora.py") == load_recipe("qwen_lora")
    assert jaxtune.main(["recipes", "--copy=qwen_lora"]) == 2
    assert "qwen_lora.py already exists" in capsys.readouterr().err
    pathlib.Path("below").mkdir()
    assert jaxtune.main(["recipes", "--copy", "qwen_lora", "below"]) == 0
    assert pathlib.Path("below/qwen_lora.py").read_text() == pathlib.Path("qwen_lora.py").read_text()
    assert jaxtune.main(["recipes", "--copy=qwen_lora", "none"]) == 2
    assert "none is not a folder; make it first" in capsys.readouterr().err
    assert jaxtune.main(["recipes", "below"]) == 2
    assert "'below' does not belong to a flag" in capsys.readouterr().err


def test_a_recipe_needs_nothing_but_what_comes_with_jaxtune():
    """An empty folder, as for a user of the wheel, without the repository."""
    pathlib.Path("empty").mkdir()
    for name in own_recipes():
        assert resolve(load_recipe(name), name).model.path


def commands_shown() -> list[str]:
    """Return the commands in the docstrings of recipes."""
    lines = [line.strip() for file in own_recipes().values() for line in file.read_text().splitlines()]
    return [line for line in lines if line.startswith("python -m jaxtune.train ")]


@pytest.mark.parametrize("command", commands_shown())
def test_a_command_of_a_docstring_runs_as_written(command):
    pathlib.Path("my.jsonl").write_text(json.dumps({"instruction": "a", "output": "b"}))
    pathlib.Path("FOLDER").mkdir()
    pathlib.Path("FOLDER", "a.txt").write_text("text")
    recipe, *settings = [part.removeprefix("--config") for part in shlex.split(command)[3:]]
    name, _, argument = recipe[1:].partition(":")
    overrides = [tuple(setting[1:].split("=", 1)) for setting in settings]
    config = resolve(load_recipe(name, argument or None), name, overrides)
    for entry in config.data.datasets:
        if pathlib.Path(entry.path).exists():
            assert open_source(entry).name == entry.path
    assert len(commands_shown()) > 20
