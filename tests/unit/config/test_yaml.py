"""Recipes in YAML: our options on top of a base; errors name the line."""

import pathlib
from itertools import pairwise

import pytest

from jaxtune.config import load_recipe, read_recipe
from jaxtune.errors import UserError


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


BOMB = "a: &a [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{new}: &{new} [{','.join([f'*{old}'] * 10)}]\n" for old, new in pairwise("abcdefghij")
)


def write(text: str, name: str = "my.yaml") -> str:
    pathlib.Path(name).write_text(text)
    return name


def resolve_text(text: str, *overrides: tuple[str, str]):
    return read_recipe(write(text)).resolve(overrides)


def test_options_stand_in_sections_or_with_dots_and_numbers_as_people_write_them():
    config = resolve_text(
        "model: {path: my/model}\n"
        "data.datasets:\n  - {path: a.jsonl, type: conversation}\n  - path: [b.jsonl, c.jsonl]\n"
        "optim:\n  learning_rate: 2e-5\n  schedule: cosine\n"
        "lora:\n"
    )
    assert (config.optim.learning_rate, config.optim.schedule, config.lora.enabled) == (2e-5, "cosine", False)
    assert [entry.path for entry in config.data.datasets] == ["a.jsonl", ("b.jsonl", "c.jsonl")]
    assert config.data.datasets[0].type == "conversation" and config.data.datasets[1].split == "train"


def test_an_unquoted_off_is_the_word():
    config = resolve_text("base: qwen_lora:my/model\nmemory.check: off\ndevice: {command_buffers: off}\n")
    assert config.memory.check == config.device.command_buffers == "off"


def test_what_two_sections_share_is_written_once():
    config = resolve_text(
        "base: qwen_lora:my/model\nlora: &few {rank: 4}\n<<: {lora.alpha: 3}\noptim: {<<: {beta1: 0.5}}\n"
    )
    assert (config.lora.rank, config.lora.alpha, config.optim.beta1) == (4, 3.0, 0.5)


def test_a_base_is_a_recipe_by_name_or_a_file_beside_it_and_what_the_file_says_counts_more():
    base = "base: qwen_lora:my/model\nlora: {rank: 4}\noptim: {learning_rate: 1e-5}\n"
    pathlib.Path("below").mkdir()
    write(base, "below/base.yaml")
    config = read_recipe(write("base: base.yaml\nlora.rank: 8\n", "below/top.yaml")).resolve([("optim.beta1", "0.8")])
    assert (config.model.path, config.lora.rank, config.optim.learning_rate) == ("my/model", 8, 1e-5)
    assert (config.optim.schedule, config.optim.beta1) == ("cosine", 0.8)
    assert load_recipe("below/top.yaml").lora.rank == 8


def test_what_a_file_makes_moot_of_its_base_is_a_note_and_its_own_values_are_not():
    config = resolve_text("base: qwen_lora:my/model\nlora: {enabled: false}\n")
    assert not config.lora.enabled
    assert resolve_text("base: qwen_lora:my/model\ndata: {validation_split: 0}\n").startup_notes == (
        "left out: recipe: eval.steps = 100: has no effect: it is read only when data.validation_split or "
        "data.eval_datasets, and data.validation_split = 0.0, data.eval_datasets is empty",
    )
    with pytest.raises(UserError, match=r"my.yaml: lora.rank = 4: has no effect"):
        resolve_text("base: qwen_full:my/model\nlora: {rank: 4}\n")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "base: qwen_lora\n\noptim:\n  lerning_rate: 3\n",
            "line 4: optim.lerning_rate = 3.*nearest: optim.learning_rate",
        ),
        ("base: qwen_lora\nlora: true\n", "line 2: lora = True: a section, not an option; its options: lora.enabled"),
        ("base: qwen_lora\nlora: {rank: x}\n", "lora.rank = 'x': expected int"),
        (
            "base: qwen_lora\ndata.datasets: [{pth: x}]\n",
            r"data.datasets\[0\].pth = 'x'.*nearest: data.datasets\[0\].path",
        ),
        ("optim: {lr: 1\n", "my.yaml, line 2: expected ',' or '}'"),
        ("optim: {lr: 1}\noptim: {lr: 2}\n", "my.yaml, line 2: optim is written twice"),
        ("optim: {lr: 1, lr: 2}\n", "my.yaml, line 1: lr is written twice"),
        ("base: qwen_lora\nlora: {rank: 4}\nlora.rank: 8\n", "line 3: lora.rank is written twice"),
        ("- a\n", "my.yaml: expected options with values"),
        ("base: my.yaml\n", "my.yaml, line 1: base = 'my.yaml': a recipe cannot start from itself"),
        ("base: [qwen_lora]\n", "line 1: base = .*expected a recipe, such as qwen_lora"),
        ("base: qwen_lor\n", "recipe qwen_lor: no such file.*jaxtune has a recipe qwen_lora"),
        (
            "hello: 1\n",
            "hello = 1: no such option.*and no options of surogate or xorl or erniekit or qefficient",
        ),
        ("yes: no\n", "line 1: yes = False: no such option"),
        ("~: 1\n", "line 1: ~ = 1: no such option"),
        ("base: qwen_lora\n<<: {optim: {lerning_rate: 3}}\n", "line 2: optim.lerning_rate = 3: no such option"),
        ("base: qwen_lora\noptim: &x {beta1: 0.5}\nlora: *x\n", "line 3: lora.beta1 = 0.5: no such option"),
        ("base: qwen_lora:m\ndata: {datasets: 5}\n", "my.yaml: data.datasets = 5: expected tuple"),
        ("base: qwen_lora:m\ndata: {datasets:}\n", r"my.yaml: data.datasets = \(\): no training data; add an entry"),
        ('base: qwen_lora:m\n"data.datasets[9].path": x\n', r"data.datasets has no entry 9; \[1\] is the next one"),
        (BOMB, "my.yaml, line 5: more than 100,000 values after its aliases are expanded"),
        ('base: qwen_lora:m\ntrain.run_name: "a\\0b"\n', r"train.run_name = 'a\\x00b': holds a NUL character"),
        (
            "base: qwen_lora:m\ntrain.epochs: " + "x" * 1_000_000,
            r"^my.yaml: train.epochs = 'x{400,500}\.\.\. \(999,\d+ characters\) \.\.\.x{400,500}': expected float",
        ),
        ("lora: !!python/object/apply:os.getcwd []\n", "line 1: could not determine a constructor for the tag"),
        ("model: {path: {{MODEL}}}\n", "my.yaml, line 1: a key is not text"),
        ("train.run_name: 2026-99-25\n", "my.yaml: month must be in 1..12; put text into quotes"),
        ("lora.rank: !!int abc\n", "my.yaml: invalid literal for int"),
        ("model: &a [*a]\n", "my.yaml, line 1: an alias inside its own value"),
        ("a: " + "[" * 3000, "my.yaml: nested too deeply"),
        ("", "my.yaml: 2 problems\n +model.path = None: must name a Hugging Face folder or hub id\n +data.datasets = "),
    ],
)
def test_what_is_wrong_is_said_with_its_line(text, told):
    with pytest.raises(UserError, match=told):
        resolve_text(text)


def test_bases_that_start_from_each_other_are_refused():
    write("base: my.yaml\n", "other.yaml")
    with pytest.raises(UserError, match="other.yaml, line 1: base = 'my.yaml': a recipe cannot start from itself"):
        resolve_text("base: other.yaml\n")


def test_an_argument_belongs_to_the_base():
    write("base: qwen_lora\n")
    with pytest.raises(UserError, match="a YAML file takes no argument; write base: NAME:my/model in it"):
        read_recipe("my.yaml", "my/model")


def test_a_file_that_is_not_text():
    pathlib.Path("my.yaml").write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(UserError, match="my.yaml: not text in UTF-8"):
        read_recipe("my.yaml")
