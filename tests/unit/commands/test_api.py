"""The Python API of `import jaxtune`, and configs that calls change."""

import pydoc
import subprocess
import sys

import pytest

import jaxtune
from jaxtune.api import restore_mesh
from jaxtune.config import keys, new_config, to_json
from jaxtune.config.schema import Config
from jaxtune.inference.sampling import SamplingOptions


def test_importing_jaxtune_is_quick_and_train_is_the_function_although_a_module_has_its_name():
    code = (
        "import sys, jaxtune; assert 'jax' not in sys.modules and 'ml_collections' not in sys.modules; "
        "first = jaxtune.train; import jaxtune.train; from jaxtune.train import main; "
        "from jaxtune import Config, Run, UserError, config_of, train; "
        "assert first is train is jaxtune.train is jaxtune.api.train and callable(train)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="no attribute 'tarin'"):
        _ = jaxtune.tarin


def test_a_config_is_built_changed_and_printed():
    config = jaxtune.config_of("qwen_lora:my/model", optim={"learning_rate": 3e-4, "muon": {}}, lora={"rank": 64})
    assert (config.model.path, config.optim.learning_rate, config.lora.rank) == ("my/model", 3e-4, 64)
    assert config.train.run_name == "qwen_lora"
    assert {said.by for said in config.said if said.key in ("optim.learning_rate", "lora.rank")} == {"call"}
    changed = jaxtune.config_of(config, data={"datasets": [{"path": "mine.jsonl"}]}, **{"lora.rank": 8})
    assert (changed.lora.rank, changed.optim.learning_rate, changed.train.run_name) == (8, 3e-4, "qwen_lora")
    assert [entry.path for entry in changed.data.datasets] == ["mine.jsonl"]
    assert changed.data.datasets[0].type == "auto", "the recipe's options for its own dataset do not apply to another"
    assert {"lora.rank = 8", "data.datasets[0].path = 'mine.jsonl'"} < set(str(changed).splitlines())
    assert "weight_decay" not in str(changed), "a default"
    assert to_json(config) != to_json(changed)


def test_a_config_of_a_recipe_may_be_checked_alone(tmp_path):
    written = new_config()
    written.optim.beta1 = 2.0
    with pytest.raises(jaxtune.UserError, match=r"config: 3 problems\n  optim.beta1 = 2.0: must be"):
        jaxtune.config_of(written)
    config = jaxtune.config_of(written, optim={"beta1": 0.8}, model={"path": "m"}, **{"data.datasets": [{"path": "a"}]})
    assert jaxtune.config_of(config) is config
    (tmp_path / "my.yaml").write_text("base: qwen_lora:m\nlora: {rank: 4}\n")
    for recipe in (tmp_path / "my.yaml", str(tmp_path / "my.yaml")):
        assert jaxtune.config_of(recipe, lora={"alpha": 8.0}).lora.rank == 4


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"optim": {"lr": 1e-4}}, "optim.lr = 0.0001: no such option; nearest: optim.learning_rate"),
        ({"optin": {"beta1": 0.5}}, "optin.beta1 = 0.5: no such option; nearest: optim.beta1"),
        ({"lora": {"rank": "8"}}, "lora.rank = '8': expected int"),
        ({"lora": {"rank": 0}}, "lora.rank = 0: must be at least 1"),
        ({"lora": 3}, "lora = 3: a section, not an option; its options: lora.enabled"),
        ({"optim": {"muon": {"momentum": 0.5}}}, "optim.muon.momentum = 0.5: has no effect"),
        ({"data": {"datasets": [{"path": "a", "typ": "text"}]}}, "data.datasets[0].typ = 'text': no such option"),
        ({"data.datasets[9].path": "b"}, "data.datasets has no entry 9; ["),
        (
            {"data": {"datasets": [{"messages": [], "id": 1}]}},
            "data.datasets: a list of samples (their keys are messages, id)",
        ),
        ({"data": {"eval_datasets": {"text": "x"}}}, "data.eval_datasets: a list of samples (their keys are text)"),
        ({"data": {"datasets": [{"pth": "a", "split": "b"}]}}, "data.datasets[0].pth = 'a': no such option; nearest"),
        ({"data": {"datasets": 5}}, "data.datasets = 5: expected tuple[Dataset, ...]"),
        ({"dialect": "xorl"}, "has no effect"),
    ],
)
@pytest.mark.parametrize("recipe", ["qwen_lora:my/model", Config()], ids=["recipe", "config"])
def test_errors_are_exceptions_with_the_same_messages(recipe, sections, said):
    if sections.get("lora") and isinstance(recipe, Config):
        sections = {**sections, "lora.enabled": True}
    with pytest.raises(jaxtune.UserError) as error:
        jaxtune.config_of(recipe, **sections)
    assert said in str(error.value)


def test_a_problem_of_many_entries_is_told_a_few_times_and_at_once(monkeypatch):
    """The wrong key is compared with the options once, not once for each entry."""
    compared = []
    monkeypatch.setattr(keys, "_ratio", lambda a, b: compared.append(a) or float(a == b))
    entries = [{"path": "a", "txet_feild": "b"} for _ in range(100)]
    with pytest.raises(jaxtune.UserError, match="100 problems") as error:
        jaxtune.config_of("qwen_lora:my/model", data={"datasets": entries})
    lines = str(error.value).splitlines()
    assert [line.split(" = ")[0].strip() for line in lines[1:4]] == [f"data.datasets[{i}].txet_feild" for i in range(3)]
    assert lines[4:] == ["  and 97 more of data.datasets[i].txet_feild"]
    assert len(compared) == 2 * len(keys.options())


def test_what_is_no_recipe_is_refused_before_anything_begins():
    with pytest.raises(jaxtune.UserError, match="a Config or a ConfigDict is expected, not int"):
        jaxtune.train(3)
    with pytest.raises(jaxtune.UserError, match="jaxtune has a recipe qwen_lora"):
        jaxtune.train("qwen_loar")


@pytest.mark.parametrize(
    ("manner", "said"),
    [
        ({"top_k": 0}, "--top_k=0: must be a whole number, at least 1"),
        ({"max_new_tokens": 1.5}, "--max_new_tokens=1.5: must be a whole number, at least 1"),
        ({"temperature": float("inf")}, "--temperature=inf: must be a finite number, at least 0"),
        ({"top_p": "0.5"}, "--top_p=0.5: must be a finite number, at least 0 and at most 1.0"),
        ({"seed": True}, "--seed=True: must be a whole number"),
        ({"stop": "end"}, "--stop='end': must be a list of texts"),
        ({"stop": [""]}, "--stop= is empty"),
    ],
)
def test_how_answers_are_made_is_checked_as_flags_are(manner, said):
    with pytest.raises(jaxtune.UserError) as error:
        SamplingOptions(**manner)
    assert str(error.value).startswith(said)
    assert SamplingOptions(temperature=0, top_k=None, stop=["a"]).seed == 0


def test_python_completes_what_is_public():
    assert dir(jaxtune) == sorted(jaxtune.__all__)
    shown = pydoc.render_doc(jaxtune.train, renderer=pydoc.plaintext)  # help(jaxtune.train)
    assert 'Train by a recipe, or continue its run: `run = jaxtune.train("quickstart"' in shown
    assert "dialect: The system that" in shown and "FUNCTIONS" not in shown, "only what can be called"


@pytest.mark.parametrize(
    ("setting", "argument"),
    [
        ("--config.train.run_name=NAME", 'train={"run_name": "NAME"}'),
        ("--config.ckpt.resume=overwrite", 'ckpt={"resume": "overwrite"}'),
        ("--config.lora.path=runs/x1/export", 'lora={"path": "runs/x1/export"}'),
        ("--config.lora.enabled=True", 'lora={"enabled": True}'),
        ("--config.quant.format=None", 'quant={"format": None}'),
        ("--config.mesh.fsdp=-1", 'mesh={"fsdp": -1}'),
        ("--config.data.special_tokens='<|a|>,<|b|>'", "data={\"special_tokens\": ('<|a|>', '<|b|>')}"),
        ("--config.train.run_name", "train.run_name"),
    ],
)
def test_options_in_errors_are_what_python_takes(setting, argument):
    with pytest.raises(jaxtune.UserError) as error, restore_mesh():
        raise jaxtune.UserError(f"choose {setting}, or leave {setting}")
    assert str(error.value) == f"choose {argument}, or leave {argument}"


def test_ipython_shows_an_error_without_a_traceback():
    assert jaxtune.UserError("what was wrong")._render_traceback_() == ["jaxtune: error: what was wrong"]
