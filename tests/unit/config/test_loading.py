"""Recipes and command lines: values arrive, mistakes are named."""

import json
import operator
import pathlib
import random
import re
import string
import subprocess
import sys
import typing

import pytest
from absl import flags
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtune.command import run
from jaxtune.config import from_json, keys, option_rules, resolve, to_json
from jaxtune.config.schema import Config
from jaxtune.errors import UserError

RECIPE = """
from jaxtune.config import dataset, new_config

def get_config(model="folder"):
    config = new_config()
    config.model.path = model
    config.data.datasets = (dataset(path="a.jsonl"), dataset(path="b.jsonl"))
    return config
"""


@pytest.fixture
def recipe(tmp_path):
    """Return a function that writes a recipe and returns its path; `lines` are added to get_config()."""

    def write(*lines, name="recipe.py"):
        text = (
            RECIPE
            if not lines
            else RECIPE.replace("    return", "".join(f"    {line}\n" for line in lines) + "    return")
        )
        path = tmp_path / name
        path.write_text(text)
        return str(path)

    return write


def load(*arguments):
    """Return the config for a command with these arguments."""
    seen = []
    assert run(lambda values: None, lambda values, config: seen.append(config), list(arguments)) == 0
    return seen[0]


def error(capsys, *arguments):
    """Return the error of a command with these arguments, which exits with code 2."""

    def define(values):
        flags.DEFINE_integer("step", None, "a step", flag_values=values)

    assert run(define, lambda values, config: pytest.fail("the body ran"), list(arguments)) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("jaxtune: error: ") and "Traceback" not in printed.err
    return printed.err


# Values


@pytest.mark.parametrize(
    ("argument", "key", "value"),
    [
        ("train.max_steps=10", "train.max_steps", 10),
        ("train.max_steps=None", "train.max_steps", None),
        ("train.epochs=2", "train.epochs", 2.0),
        ("optim.learning_rate=1e-4", "optim.learning_rate", 1e-4),
        ("mesh.data=-1", "mesh.data", -1),
        ("data.packing=false", "data.packing", False),
        ("log.tensorboard", "log.tensorboard", True),
        ("train.run_name=100", "train.run_name", "100"),
        ("train.run_name=1e3", "train.run_name", "1e3"),
        ("data.cache_dir=None", "data.cache_dir", None),
        ("train.max_steps=-1", "train.max_steps", None),  # not set, as other systems write it
        ("train.output_dir='x'", "train.output_dir", "'x'"),
        ("precision.recipe=fp32", "precision.recipe", "fp32"),
        ("ckpt.resume=5", "ckpt.resume", 5),
        ("ckpt.resume=never", "ckpt.resume", "never"),
        ("optim.no_decay=[a-z]", "optim.no_decay", "[a-z]"),
        ("data.datasets[1].path=x", "data.datasets", ("a.jsonl", "x")),
    ],
)
def test_command_line_value(recipe, argument, key, value):
    extra = ["--config.mesh.fsdp=1"] if "mesh" in key else ["--config.optim.weight_decay=1"]
    got = operator.attrgetter(key)(load(f"--config={recipe()}", *extra, f"--config.{argument}"))
    if key == "data.datasets":
        got = tuple(entry.path for entry in got)
    assert got == value and type(got) is type(value)


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("a.jsonl", "a.jsonl"),
        ("~/a.jsonl,s3://bucket/b/*.parquet", ("~/a.jsonl", "s3://bucket/b/*.parquet")),
        ("('a b.jsonl', 'c.jsonl')", ("a b.jsonl", "c.jsonl")),
    ],
)
def test_a_path_is_one_or_a_list(recipe, text, path):
    assert load(f"--config={recipe()}", f"--config.data.datasets[0].path={text}").data.datasets[0].path == path


@pytest.mark.parametrize(
    ("settings", "entries"),
    [
        (["eval_datasets=v.jsonl"], [("v.jsonl", "auto")]),
        (["eval_datasets=v.jsonl,org/name"], [("v.jsonl", "auto"), ("org/name", "auto")]),
        (["eval_datasets=my v.jsonl"], [("my v.jsonl", "auto")]),
        (["eval_datasets=[{'path': 'v.jsonl', 'type': 'text'}, 'w']"], [("v.jsonl", "text"), ("w", "auto")]),
        (
            ["eval_datasets[1].path=w", "eval_datasets[0].path=v", "eval_datasets[1].type=text"],
            [("v", "auto"), ("w", "text")],
        ),
        (["eval_datasets[0].type=text", "eval_datasets=v.jsonl"], [("v.jsonl", "text")]),
        (["eval_datasets=None"], []),
    ],
)
def test_datasets_are_added_by_flags(recipe, settings, entries):
    config = load(f"--config={recipe()}", *(f"--config.data.{setting}" for setting in settings))
    assert [(entry.path, entry.type) for entry in config.data.eval_datasets] == entries
    added = load(f"--config={recipe()}", "--config.data.datasets[2].path=c.jsonl").data.datasets
    assert [entry.path for entry in added] == ["a.jsonl", "b.jsonl", "c.jsonl"]


@pytest.mark.parametrize(
    "written",
    ["'v.jsonl'", "['v.jsonl']", "{'path': 'v.jsonl'}", "(dataset(path='v.jsonl'),)", "[{'path': 'v.jsonl'}]"],
)
def test_a_recipe_lists_datasets_as_flags_do(recipe, written):
    path = recipe(f"config.data.eval_datasets = {written}")
    (entry,) = load(f"--config={path}", "--config.data.eval_datasets[0].type=text").data.eval_datasets
    assert (entry.path, entry.type) == ("v.jsonl", "text")


@pytest.mark.parametrize(
    "key", ["data.validation_split", "eval.steps", "train.epochs", "optim.warmup_steps", "log.wandb.tags"]
)
def test_none_leaves_an_option_out(recipe, key):
    default = keys.options()[key].default
    for config in (
        load("--config=" + recipe(f"config.{key} = None")),
        load(f"--config={recipe()}", f"--config.{key}=None"),
    ):
        assert operator.attrgetter(key)(config) == default


@pytest.mark.parametrize(
    ("text", "value"),
    [("('q_proj','v_proj')", ("q_proj", "v_proj")), ("q_proj|v_proj", "q_proj|v_proj"), ("all-linear", "all-linear")],
)
def test_target_modules_are_a_tuple_or_a_string_everywhere(recipe, text, value):
    on_command_line = load(f"--config={recipe()}", "--config.lora.enabled", f"--config.lora.target_modules={text}")
    in_recipe = load("--config=" + recipe("config.lora.enabled = True", f"config.lora.target_modules = {value!r}"))
    assert on_command_line.lora.target_modules == in_recipe.lora.target_modules == value


def test_many_values_on_one_command_line(recipe):
    """The example in XORL's documentation."""
    settings = {
        "optim.learning_rate": 2e-5,
        "train.output_dir": "outputs/my_run",
        "mesh.stage": 4,
        "attention.backend": "mosaic",
        "data.seq_len": 16384,
        "lora.enabled": True,
        "lora.rank": 32,
    }
    config = load(f"--config={recipe()}", *(f"--config.{key}={value}" for key, value in settings.items()))
    assert {key: operator.attrgetter(key)(config) for key in settings} == settings


def test_ways_to_write_a_flag(recipe):
    config = load(
        "--config.train.seed", "-0", "--config.train.max_steps", "3", "--noconfig.data.packing", "--config", recipe()
    )
    assert config.train.max_steps == 3 and not config.data.packing


def test_a_recipe_file_may_stand_alone(recipe):
    assert load(f"{recipe()}:org/model", "--config.train.seed=1").model.path == "org/model"


def test_a_config_is_shown_in_short(recipe):
    assert repr(load(recipe())).splitlines()[0] == "model.path = 'folder'"


def test_values_of_other_systems_are_answered_with_ours():
    for key, meant in keys.VALUES.items():
        option = keys.options()[key]
        assert not set(meant) & set(keys.describe(option.annotation).replace("'", "").split(" | "))
        assert all(repr(ours) in keys.describe(option.annotation) for ours in meant.values() if " " not in ours)


def test_the_last_of_two_equal_flags_wins(recipe):
    assert load(f"--config={recipe()}", "--config.train.seed=1", "--config.train.seed=2").train.seed == 2


def test_text_after_the_colon_is_the_argument_of_get_config(recipe):
    assert load(f"--config={recipe()}:org/model").model.path == "org/model"
    assert load(f"--config={recipe()}").model.path == "folder"


def test_recipes_inherit_by_import_from_their_own_folder(recipe, tmp_path):
    for value in (1, 2):
        folder = tmp_path / str(value)
        folder.mkdir()
        (folder / "parent.py").write_text(RECIPE.replace("    return", f"    config.train.seed = {value}\n    return"))
        (folder / "child.py").write_text("import parent\nget_config = parent.get_config\n")
        assert load(f"--config={folder / 'child.py'}").train.seed == value
    assert "parent" not in sys.modules and str(folder) not in sys.path


def test_run_name_is_the_recipes_name_unless_set(recipe):
    assert load("--config=" + recipe(name="my_run.py")).train.run_name == "my_run"
    assert load("--config=" + recipe(name="my_run.py"), "--config.train.run_name=x").train.run_name == "x"


def test_a_recipe_may_give_an_int_for_a_float_and_a_list_for_a_tuple(base):
    config = base
    config.train.epochs = 3
    config.data.datasets = [{"path": "x"}]
    resolved = resolve(config, "recipe")
    assert resolved.train.epochs == 3.0 and resolved.data.datasets[0].split == "train"


def values_of(annotation):
    """Return a hypothesis strategy for the values of an option; JSON has no NaN and no infinity."""
    members = typing.get_args(annotation) if typing.get_origin(annotation) is not typing.Literal else ()
    finite = st.floats(allow_nan=False, allow_infinity=False)
    return finite if annotation is float or float in members else st.from_type(annotation)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_json_keeps_every_value(data):
    plain = [option for option in keys.options().values() if "datasets" not in option.key]
    option = data.draw(st.sampled_from(plain))
    value = data.draw(values_of(option.annotation))
    nested = value
    for name in reversed(option.key.split(".")):
        nested = {name: nested}
    config = from_json(json.dumps(nested))
    assert operator.attrgetter(option.key)(config) == value
    assert from_json(to_json(config)) == config


def test_a_config_saved_before_an_option_was_renamed_has_the_new_name():
    config = from_json('{"data": {"chat_template": "chatml", "seq_len": 64}, "chat": {"train_on_eos": "last"}}')
    assert (config.chat.template, config.chat.train_on_eos, config.data.seq_len) == ("chatml", "last", 64)
    assert from_json('{"data": {"chat_template": null}}') == Config()
    assert all(new in keys.options() and old not in keys.options() for old, new in keys.RENAMED.items())


def test_json_keeps_datasets(base):
    config = resolve(base, "recipe")
    assert from_json(to_json(config)) == config and isinstance(hash(config), int)


# Mistakes


@pytest.mark.parametrize(
    ("argument", "parts"),
    [
        ("optim.lerning_rate=1", ["optim.lerning_rate = '1'", "nearest: optim.learning_rate: float", "peak"]),
        ("train.learning_rate=1", ["nearest: optim.learning_rate"]),
        ("data.path=chats.jsonl", ["nearest: data.datasets:"]),
        ("data.datasets[1].pth=x", ["data.datasets[1].pth = 'x'", "nearest: data.datasets[1].path"]),
        ("data.datasets[3].path=x", ["data.datasets has no entry 3; [2] is the next one"]),
        ("data.datasets[2].type=text", ["data.datasets[2].path = None: must name a file"]),
        ("optim=3", ["a section", "optim.learning_rate"]),
        ("data.datasets=[{'pth': 'x'}]", ["data.datasets[0].pth = 'x'", "nearest: data.datasets[0].path"]),
        ("optim.name=adamw_torch", ["optim.name = 'adamw_torch'", "; nearest: adamw"]),
        ("data.datasets[0].type=sharegpt", ["; nearest: conversation"]),
        ("data.datasets[0].type=instructions", ["; nearest: instruction"]),
        ("preference.loss=grpo", ["; nearest: rollout.rewards"]),
        ("train.max_steps=abc", ["train.max_steps = 'abc': expected int | None (optimizer steps"]),
        ("train.max_steps=1.5", ["train.max_steps = '1.5': expected int"]),
        ("data.seq_len=true", ["data.seq_len = 'true': expected int"]),
        ("data.packing=2", ["data.packing = '2': expected True or False"]),
        ("memory.unroll=auto", ["memory.unroll = 'auto': expected True, False or None (compile each layer"]),
        ("optim.learning_rate=nan", ["optim.learning_rate = 'nan': expected a finite float"]),
        ("precision.recipe=fp8", ["precision.recipe = 'fp8': expected 'bf16' | 'fp32'"]),
        ("ckpt.resume=newest", ["ckpt.resume = 'newest': expected 'auto' | 'never' | 'overwrite' | int"]),
    ],
)
def test_wrong_setting_on_the_command_line(recipe, capsys, argument, parts):
    message = error(capsys, f"--config={recipe()}", f"--config.{argument}")
    assert all(part in message for part in parts), message


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("config.optim.lerning_rate = 1", ["line 8", "config.optim.lerning_rate = 1", "nearest: optim.learning_rate"]),
        ("config.optimm.learning_rate = 1", ["line 8", "optimm: no such option; nearest: optim.learning_rate"]),
        ("config.data.datasets += (dataset(pth='x'),)", ["line 8", "pth = 'x'", "nearest: data.datasets[i].path"]),
        ("config.data.datasets += ({'path': 'x', 'pth': 1},)", ["data.datasets[2].pth = 1", "data.datasets[2].path"]),
        ("config.train.max_steps = '10'", ["train.max_steps = '10': expected int | None"]),
        ("config.optim.learning_rate = float('inf')", ["optim.learning_rate = inf: expected a finite float"]),
        ("config.log.wandb.tags = (1,)", ["log.wandb.tags = [1]: expected tuple[str, ...]"]),
        ("config.optim = 3", ["optim = 3: expected a section"]),
        ("del config.optim", ["line 8", "locked"]),
        ("1 / 0", ["line 8: 1 / 0", "ZeroDivisionError"]),
        ("import no_such_module", ["line 8", "ModuleNotFoundError"]),
        ("open('no such file')", ["line 8", "FileNotFoundError"]),
        ("x = = 1", ["line 8", "invalid syntax"]),
        ("return None", ["get_config() returned NoneType", "new_config()"]),
    ],
)
def test_mistake_in_a_recipe(recipe, capsys, line, parts):
    message = error(capsys, "--config=" + recipe(line))
    assert all(part in message for part in ["recipe.py", *parts]), message


def test_all_problems_are_told_at_once(recipe, capsys):
    path = recipe("config.data.seq_len = 'long'", "config.model.path = None")
    message = error(
        capsys, f"--config={path}", "--config.trian.seed=1", "--config.eval.steps=x", "--config.lora.rank=3"
    )
    for key in ("data.seq_len", "model.path", "trian.seed", "eval.steps", "lora.rank"):
        assert len(re.findall(rf"^  {key}\b", message, re.MULTILINE)) == 1, message
    assert "5 problems" in message


def test_a_wrong_key_hides_the_complaint_that_the_right_one_is_unset(recipe, capsys):
    path = recipe("config.model.path = None")
    assert "must name" not in error(capsys, f"--config={path}", "--config.model.pth=x")


def test_recipe_file_that_is_not_there(recipe, capsys, tmp_path):
    recipe(name="other.py")
    message = error(capsys, f"--config={tmp_path}/recip.py")
    assert "recip.py: no such file" in message and "other.py" in message


def test_recipe_without_get_config(capsys, tmp_path):
    (tmp_path / "empty.py").write_text("")
    assert "get_config()" in error(capsys, f"--config={tmp_path}/empty.py")


def test_argument_for_a_recipe_that_takes_none(capsys, tmp_path):
    (tmp_path / "plain.py").write_text(RECIPE.replace('model="folder"', "").replace("= model", "= 'folder'"))
    assert "takes 0 positional arguments" in error(capsys, f"--config={tmp_path}/plain.py:x")


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--stpe=3"], "--stpe: no such flag; nearest: --step"),
        (["--train.seed=3"], "nearest: --config.train.seed"),
        (["--train.lr", "2e-5"], "--train.lr: no such flag; XORL's option is here --config.optim.learning_rate=2e-05"),
        (["--lora.lora_rank=4"], "--lora.lora_rank: no such flag; XORL's option is here --config.lora.rank=4"),
        (["--step=x"], "--step=x"),
        (["--step"], "--step"),
        (["stray"], "'stray' does not belong to a flag; write --name=value"),
        (["qwen_lora:m"], "write --config=qwen_lora:m"),
        (["--noconfig.data.packing=1"], "--noconfig.data.packing=1"),
        (["--noconfig.train.seed"], "nearest: --config.train.seed"),
        (["--flagfile=missing"], "missing"),
    ],
)
def test_wrong_plain_flag(recipe, capsys, arguments, part):
    assert part in error(capsys, f"--config={recipe()}", *arguments)


def test_missing_recipe_flag(capsys):
    assert "--config=... is missing" in error(capsys)


def test_body_errors_and_exit_codes(capsys):
    def fail(values, config):
        raise UserError("tensor x has the wrong shape")

    def interrupt(values, config):
        raise KeyboardInterrupt

    assert run(lambda values: None, fail, [], with_config=False) == 2
    assert capsys.readouterr().err == "jaxtune: error: tensor x has the wrong shape\n"
    assert run(lambda values: None, lambda values, config: 7, [], with_config=False) == 7
    assert run(lambda values: None, interrupt, [], with_config=False) == 130
    assert capsys.readouterr().err == "jaxtune: interrupted\n"
    missing = lambda values, config: pathlib.Path("/nowhere/at/all").read_text()  # noqa: E731
    assert run(lambda values: None, missing, [], with_config=False) == 2
    assert capsys.readouterr().err == "jaxtune: error: /nowhere/at/all: No such file or directory\n"


def test_help_shows_the_flags(capsys):
    def define(values):
        flags.DEFINE_integer("step", None, "which step to read", flag_values=values, required=True)
        flags.DEFINE_integer("show", 0, "samples to show", flag_values=values)
        flags.DEFINE_multi_string("stop", [], "text that ends an answer", flag_values=values)

    assert run(define, lambda values, config: pytest.fail("the body ran"), ["--help"]) == 0
    printed = capsys.readouterr().out
    assert "Recipes and command lines" in printed and "--step: which step to read" in printed and "--config" in printed
    assert "--show: samples to show (default: 0)\n" in printed and "--stop: text that ends an answer\n" in printed


def test_saved_config_that_is_damaged():
    with pytest.raises(UserError, match="not JSON"):
        from_json("{")
    with pytest.raises(UserError, match=r"nearest: optim\.learning_rate"):
        from_json('{"optim": {"learning_rat": 1}}')


# Nearest keys


def typo(key, edit, rng):
    i = rng.randrange(len(key) - 1)
    letter = rng.choice(string.ascii_lowercase + string.digits + "_")
    return {
        "delete": key[:i] + key[i + 1 :],
        "insert": key[:i] + letter + key[i:],
        "replace": key[:i] + letter + key[i + 1 :],
        "transpose": key[:i] + key[i + 1] + key[i] + key[i + 2 :],
    }[edit]


def test_nearest_key_finds_the_meant_one_after_a_typo():
    rng = random.Random(0)
    misses, tried = [], 0
    for number, key in enumerate(list(keys.options())[::3]):
        for edit in (("delete", "insert"), ("replace", "transpose"))[number % 2]:
            wrong = typo(key, edit, rng)
            if wrong in keys.options():
                continue
            tried += 1
            nearest = keys.nearest_option(wrong)
            if nearest is None or nearest.key != key:
                misses.append((key, wrong))
    assert tried > 150 and len(misses) <= 0.05 * tried, misses


@pytest.mark.parametrize(
    ("flag", "option"),
    [
        ("data", "data.datasets"),
        ("model", "model.path"),
        ("epochs", "train.epochs"),
        ("num_train_epochs", "train.epochs"),
        ("max_steps", "train.max_steps"),
        ("lr", "optim.learning_rate"),
        ("learning_rate", "optim.learning_rate"),
        ("optim", "optim.name"),
        ("batch_size", "train.micro_batch_size"),
        ("output_dir", "train.output_dir"),
        ("name", "train.run_name"),
        ("max_tokens", "data.datasets[i].max_tokens"),
        ("lora", "lora.enabled"),
        ("file", "data.datasets"),
    ],
)
def test_flags_that_newcomers_try_are_answered_with_the_option(recipe, capsys, flag, option):
    assert f"--{flag}: no such flag; nearest: --config.{option}\n" in error(
        capsys, f"--config={recipe()}", f"--{flag}=3"
    )


def test_what_a_name_without_its_section_means_is_an_option():
    assert set(keys._WITHOUT_SECTION.values()) <= keys.options().keys()


def test_no_nearest_key_for_something_unlike_any():
    assert keys.nearest_option("zzzz") is None
    assert "python -m jaxtune.options" in keys.no_such_option("zzzz")


# The schema itself


def test_the_config_remembers_who_said_a_value(base):
    config = resolve(base, "recipe", [("train.seed", "0"), ("data.datasets[1].path", "x")])
    said = {said.key: said.by for said in config.said}
    assert said["model.path"] == said["data.datasets[0].path"] == "recipe"
    assert said["train.seed"] == said["data.datasets[1].path"] == "command line"
    assert "optim.name" not in said and "said" not in json.loads(to_json(config))


@pytest.mark.parametrize("option", keys.options().values(), ids=lambda option: option.key)
def test_rules_of_an_option_are_about_numbers_and_options(option):
    prefix = f"{option.key.rpartition('.')[0]}." if "[i]" in option.key else ""
    for condition in option.when:
        assert all(prefix + name in keys.options() for name in keys.names_in_expression(condition)), condition
    numbers = (int, float)
    assert (
        not option.within
        or not isinstance(option.default, numbers)
        or option_rules.in_interval(option.default, option.within)
    )


def test_every_option_has_a_meaning_and_a_default_of_its_type():
    for option in keys.options().values():
        assert option.doc and not option.doc.endswith("."), option.key
    assert from_json(to_json(Config())) == Config()


def test_the_config_loads_without_jax():
    code = "import sys, jaxtune.command, jaxtune.options, jaxtune.__main__; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("yes", "lora.enabled", True),
        ("1", "lora.enabled", True),
        ("Off", "train.deterministic", False),
        ("q_proj,v_proj", "lora.target_modules", ("q_proj", "v_proj")),
        ("('q_proj','v_proj')", "lora.target_modules", ("q_proj", "v_proj")),
        ("q_proj|v_proj", "lora.target_modules", "q_proj|v_proj"),
        (r"layers\.1\.", "train.freeze", r"layers\.1\."),
        ("a,b", "log.wandb.tags", ("a", "b")),
        ("a", "log.wandb.tags", ("a",)),
        ("<|im_start|>,<tool call>", "data.special_tokens", ("<|im_start|>", "<tool call>")),
        ("lm_head=0.5", "optim.lr_multipliers", ("lm_head=0.5",)),
        (r"['lm_head=0.5','layers\.0\.=2']", "optim.lr_multipliers", ("lm_head=0.5", r"layers\.0\.=2")),
        (r"{'lm_head': 0.5, 'layers\.0\.': 2}", "optim.lr_multipliers", ("lm_head=0.5", r"layers\.0\.=2")),
        (
            "{'rope_theta': 1e6, 'sliding_window': None}",
            "model.overrides",
            ("rope_theta=1000000.0", "sliding_window=null"),
        ),
        (r"Q: {instruction}\nA: ", "data.datasets[0].prompt_format", "Q: {instruction}\nA: "),
        (r"a\tb\\n", "eval.sample_prompt", "a\tb\\\\n"),
        (r"<think>\n", "chat.response_prefix", "<think>\n"),
        ("user,assistant", "chat.roles", ("user", "assistant")),
        ("user", "chat.roles", ("user",)),
        ("yes", "memory.unroll", True),
        ("last_round+hermes", "chat.loss_scale", "last_round+hermes"),
    ],
)
def test_values_on_the_command_line_as_people_write_them(recipe, text, key, value):
    needs = {"lora.target_modules": ["lora.enabled=true"], "data.datasets[0].prompt_format": []}
    needs["log.wandb.tags"] = ["log.wandb.enabled=true"]
    needs["data.datasets[0].prompt_format"] = ["data.datasets[0].type=instruction"]
    config = load(
        f"--config={recipe()}", *(f"--config.{need}" for need in needs.get(key, [])), f"--config.{key}={text}"
    )
    value_there = config
    for part in re.findall(r"\w+", key):
        value_there = value_there[int(part)] if part.isdigit() else getattr(value_there, part)
    assert value_there == value


@pytest.mark.parametrize("setting", ["train.output_dir=None", "data.special_tokens=a b", "lora.enabled=maybe"])
def test_values_that_no_option_of_the_type_has_say_what_would_be_one(recipe, setting, base):
    messages = {
        "output_dir": "expected str",
        "special_tokens": r"such as \('a b',\)",
        "enabled": "expected True or False",
    }
    with pytest.raises(UserError, match=messages[re.split("[.=]", setting)[1]]):
        resolve(base, "recipe", [tuple(setting.split("="))])


def test_names_of_other_systems_are_answered_with_ours():
    """Each is an alias of an existing option, and none is the name of another option."""
    named = 0
    for key, option in keys.options().items():
        for alias in option.also.split() if not key.startswith("data.eval_datasets[") else ():
            assert (nearest := keys.nearest_option(f"train.{alias}")) and nearest.key == key
            assert not any(other.rpartition(".")[2] == alias for other in keys.options()), alias
            named += 1
    assert named >= 40
