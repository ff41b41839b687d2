"""Learning from preferences: adapters, full training with a copy of the reference, a reward model."""

import math

import pytest
from journey import check_resumed_run, load_in_transformers
from runs import call, metrics, recipe_command, write_answers

ADAPTER = {"lora.rank": 4, "model.dtype": "float32", "precision.recipe": "fp32"}
WHOLE = {"lora.enabled": False, "model.dtype": "float32", "precision.recipe": "fp32", "optim.learning_rate": 1e-3}


@pytest.fixture(scope="module")
def data(home):
    """Return {form: options}: pairs, and single answers labelled as wanted or not."""
    files = {form: write_answers(home / f"{form}.jsonl", paired=form == "pairs") for form in ("pairs", "answers")}
    options = {"data.datasets[0].type": "auto", "data.seq_len": 128}
    return {form: {"data.datasets[0].path": file, **options} for form, file in files.items()}


@pytest.fixture(scope="module")
def adapter(home, data):
    """Return the folder of a run that trains adapters, was resumed, and was exported."""
    return check_resumed_run(home, "qwen_dpo.py", "dpo", **ADAPTER, **data["pairs"])[0]


def test_adapters_learn_which_answer_is_better(home, adapter):
    """At the first step DPO prefers neither answer, and its loss is ln 2; later it prefers the chosen answers."""
    first, *_, last = [row for row in metrics(adapter) if "loss" in row]
    assert abs(first["loss"] - math.log(2)) <= 1e-6 and first["rewards/margins"] == 0 and first["pairs"] > 0
    assert last["rewards/margins"] > 0.1 and last["rewards/accuracies"] > 0.9
    evaluated = [row for row in metrics(adapter) if "eval_loss" in row][-1]
    assert evaluated["eval_rewards/accuracies"] > 0.9 and "eval_perplexity" not in evaluated
    exported = home / "dpo-exported"
    call("jaxtune.export", f"--run={adapter}", f"--output={exported}", "--merge")
    load_in_transformers(exported, home / "model", adapter / "export", within=1e-4)


@pytest.mark.parametrize(("recipe", "form"), [("qwen_orpo.py", "pairs"), ("qwen_kto.py", "answers")])
@pytest.mark.nightly
def test_recipes_train_and_resume_exactly(home, data, recipe, form):
    folder, _ = check_resumed_run(home, recipe, recipe.removesuffix(".py"), **ADAPTER, **data[form])
    first, *_, last = [row for row in metrics(folder) if "loss" in row]
    gains = [row["rewards/chosen"] - row["rewards/rejected"] for row in (first, last)]
    assert gains[1] > gains[0] + 0.01


@pytest.fixture(scope="module")
def whole(home, data):
    """Return the folder of a run that trains all weights, was resumed, and was exported."""
    return check_resumed_run(home, "qwen_dpo.py", "dpo-whole", **WHOLE, **data["pairs"])[0]


@pytest.mark.nightly
def test_all_weights_keep_what_they_started_from(home, data, whole):
    """Checkpoints hold the reference, and reference_update_steps replaces it by the current model."""
    first, *_, last = [row for row in metrics(whole) if "loss" in row]
    assert abs(first["loss"] - math.log(2)) <= 1e-6 and last["rewards/margins"] > 0.1
    updated = {"preference.reference_update_steps": 4, "export.at_end": False}
    call(*recipe_command(home, "qwen_dpo.py", "dpo-updated", **WHOLE, **data["pairs"], **updated))
    rows = metrics(home / "runs" / "dpo-updated")
    margins = [row["rewards/margins"] for row in rows if "loss" in row]
    assert margins[:4] == [row["rewards/margins"] for row in metrics(whole) if "loss" in row][:4]
    assert margins[3] > 0.01 and margins[4] == 0 < margins[5]


@pytest.mark.nightly
def test_the_reference_may_be_another_model(home, data, whole, adapter):
    """Gains that the reference has learned too do not count; the reference may be a model or an adapter."""
    short = {"train.max_steps": 2, "export.at_end": False, "data.validation_split": 0}
    options = {**WHOLE, **data["pairs"], **short, "preference.reference": whole / "export"}
    call(*recipe_command(home, "qwen_dpo.py", "other-reference", **options))
    first = metrics(home / "runs" / "other-reference")[0]
    assert first["rewards/margins"] < -0.1
    exported, margins = adapter / "export", {}
    for name, changes in {
        "from": {"lora.path": exported},
        "against": {"preference.reference": exported},
        "scored-against": {"preference.reference": exported, "preference.precompute_reference": True},
        # A is read from the file, not drawn by the seed; evaluations use the reference too.
        "half-from": {"lora.path": exported, "lora.freeze_a": True, "train.seed": 3, "data.validation_split": 0.1},
        "scored-dora": {"lora.use_dora": True, "lora.init": "pissa", "preference.precompute_reference": True},
    }.items():
        options = {**ADAPTER, **data["pairs"], **short, **changes}
        call(*recipe_command(home, "qwen_dpo.py", f"{name}-adapter", **options))
        margins[name] = metrics(home / "runs" / f"{name}-adapter")[0]["rewards/margins"]
    assert margins["from"] == margins["half-from"] == 0 and margins["against"] < -0.1
    assert abs(margins["scored-dora"]) <= 1e-3
    assert abs(margins["scored-against"] / margins["against"] - 1) <= 1e-4


@pytest.mark.nightly
def test_a_reference_may_be_computed_once(home, data, whole):
    """The losses are the same as if each step computes the reference; its scores are cached, also for `evaluate`."""
    options = {**WHOLE, **data["pairs"], "preference.precompute_reference": True}
    folder, output = check_resumed_run(home, "qwen_dpo.py", "dpo-precomputed", **options)
    assert output.count("scoring") == 2  # training and validation documents
    expected, losses = ([row["loss"] for row in metrics(run) if "loss" in row] for run in (whole, folder))
    assert max(abs(a / b - 1) for a, b in zip(expected, losses)) <= 1e-5
    assert "scoring" not in call("jaxtune.evaluate", f"--run={folder}")
    alone = ("jaxtune.evaluate", f"--config={folder / 'config.json'}", f"--model={folder / 'export'}")
    assert "compares with a reference: give --run" in call(*alone, code=2)


def test_a_reward_model_of_pairs(home, data):
    options = {**WHOLE, **data["pairs"], "preference.loss": "bradley_terry", "preference.beta": 0.1}
    options |= {"model.head": "classification", "model.num_labels": 1}
    folder, _ = check_resumed_run(home, "qwen_dpo.py", "reward", **options)
    first, *_, last = [row for row in metrics(folder) if "loss" in row]
    assert last["accuracy"] > 0.9 and last["margin"] > first["margin"]
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("torch", reason="loading the results needs torch (Python 3.11 here)")
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(folder / "export")
    assert loaded.config.num_labels == 1
