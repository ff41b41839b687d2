"""`train.recommend` has a rule of thumb for each mode; set options stay, and each value is printed with its source."""

import pytest
from tiny import write_model_folder

from jaxtune.config import load_recipe, read_recipe, resolve, to_json
from jaxtune.weights.architecture import count_parameters

LORA = {"lora.enabled": "True"}
PREFERENCES = {"preference.loss": "sigmoid"}
QLORA = LORA | {"quant.format": "nf4"}


def recommend(base, count=count_parameters, **settings):
    return resolve(base, "recipe", {"train.recommend": "True", **settings}.items(), count=count)


# settings, billions of parameters, the learning rate, part of the output
MODES = [
    ({}, 0.6, 3e-5, "recommended: optim.learning_rate = 3e-05 (full: ERNIEKit's"),
    (LORA, 0.6, 3e-4, "recommended: optim.learning_rate = 0.0003 (LoRA: ERNIEKit's"),
    (PREFERENCES, 0.6, 1e-6, "recommended: optim.learning_rate = 1e-06 (preferences: ERNIEKit's"),
    (PREFERENCES | QLORA, 0.6, 1e-5, "recommended: optim.learning_rate = 1e-05 (preferences, LoRA: ERNIEKit's"),
    (QLORA, 7.0, 2e-4, "recommended: optim.learning_rate = 0.0002 (QLoRA, 7 billion parameters: Dettmers et al. 2023"),
    (QLORA, 70.0, 1e-4, "recommended: optim.learning_rate = 0.0001 (QLoRA, 70 billion parameters: Dettmers"),
    (
        {"model.from_scratch": "True"},
        0.125,
        6e-4,
        "recommended: optim.learning_rate = 0.0006 (pretraining, 0.12 billion",
    ),
    ({"model.from_scratch": "True"}, 13.0, 1e-4, "recommended: optim.learning_rate = 0.0001 (pretraining, 13 billion"),
]


@pytest.mark.parametrize(("settings", "billions", "rate", "told"), MODES)
def test_a_mode_and_size_have_their_learning_rate_and_warmup(base, settings, billions, rate, told):
    config = recommend(base, count=lambda model: billions * 1e9, **settings)
    assert (config.optim.learning_rate, config.optim.warmup_ratio) == (rate, 0.03)
    first, second = config.startup_notes
    assert first.startswith(told) and second.startswith(
        "recommended: optim.warmup_ratio = 0.03 (1% to 10% of steps: ERNIE"
    )


def test_without_the_option_nothing_is_recommended(base):
    config = resolve(base, "recipe", LORA.items())
    assert (config.optim.learning_rate, config.optim.warmup_ratio, config.startup_notes) == (2e-4, 0.0, ())


def test_what_the_recipe_or_the_command_line_sets_stays(base):
    base.optim.learning_rate = 1e-3
    config = recommend(base, **LORA, **{"optim.warmup_steps": "5"})
    assert (config.optim.learning_rate, config.optim.warmup_steps, config.optim.warmup_ratio) == (1e-3, 5, 0.0)
    rate, warmup = config.startup_notes
    assert rate.endswith("but optim.learning_rate is set and stays")
    assert warmup.endswith("but optim.warmup_steps is set and stays")


def test_a_default_that_is_typed_is_set_too(base):
    assert recommend(base, **LORA, **{"optim.learning_rate": "2e-4"}).optim.learning_rate == 2e-4


def test_reward_models_have_no_rule_of_thumb(base):
    rewards = {"preference.loss": "bradley_terry", "model.head": "classification", "model.num_labels": "1"}
    config = recommend(base, **rewards)
    assert config.optim.learning_rate == 2e-4 and config.optim.warmup_ratio == 0.03
    assert (
        "recommended: nothing for optim.learning_rate: there is no rule of thumb for reward" in config.startup_notes[0]
    )


def test_other_optimizers_have_no_rule_of_thumb(base):
    config = recommend(base, **{"optim.name": "lion"})
    assert config.optim.learning_rate == 2e-4
    assert "recommended: nothing for optim.learning_rate: rules of thumb are for AdamW" in config.startup_notes[0]


def test_the_size_is_that_of_config_json(base, tmp_path):
    base.model.path = str(write_model_folder(tmp_path / "model"))
    base.model.from_scratch = True
    (line, _) = recommend(base).startup_notes
    assert "recommended: optim.learning_rate = 0.0006 (pretraining, 3.2e-05 billion parameters" in line


def test_a_run_that_was_recommended_values_repeats_them(base, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = recommend(base, **LORA)
    (tmp_path / "config.json").write_text(to_json(config))
    assert resolve(load_recipe("config.json"), "config.json") == config


def test_surogates_switch_counts_its_defaults_as_not_set_and_the_values_of_its_file_as_set(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = "model: my/model\ndatasets: [{path: a.jsonl, type: conversation}]\napply_recommended_values: true\n"
    (tmp_path / "its.yaml").write_text(text)
    assert read_recipe("its.yaml").resolve().optim.learning_rate == 3e-4
    (tmp_path / "its.yaml").write_text(text + "learning_rate: 2e-4\n")
    assert read_recipe("its.yaml").resolve().optim.learning_rate == 2e-4
