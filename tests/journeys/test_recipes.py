"""The other recipes: trained, resumed to equal bits, evaluated, exported, loaded."""

import itertools
import json
import random

import numpy as np
import pytest
from journey import check_resumed_run, load_in_transformers
from nightly_rows import nightly_except
from runs import call, metrics, recipe_command, write_conversations
from safetensors.numpy import load_file
from tiny import byte_tokenizer, save_torch_model

TEXT = {
    "data.datasets[0].path": "{home}/text",
    "data.datasets[0].type": "text",
    "data.datasets[0].subset": None,
    "optim.cooldown_steps": 2,
}
# A stream has no validation split; a step has four rows, so that windows end within steps and between them.
STREAM = {
    "data.validation_split": 0.0,
    "data.window_rows": 6,
    "data.eval_datasets[0].path": "{home}/chat.jsonl",
    "data.eval_datasets[0].subset": None,
    "data.eval_datasets[0].split": "train",
    "train.micro_batch_size": 2,
}
TOKENS = ",".join(f"<|tool {number}|>" for number in range(80))  # more tokens than the model has rows left for
ADAPTER = {"lora.rank": 4, "model.dtype": "float32"}
RECIPES = {
    "qwen_full.py": {"optim.learning_rate": 1e-3, "data.special_tokens": TOKENS},
    "qwen_full_8bit.py": {"optim.learning_rate": 1e-3},
    "llama_pretrain.py": TEXT,
    "qwen_pretrain_normuon.py": TEXT,
    "pretrain_stream.py": TEXT | STREAM | {"data.eval_datasets[0].type": "conversation"},
    "mix_and_stream.py": ADAPTER
    | STREAM
    | {"data.datasets[1].path": "{home}/text", "data.datasets[1].subset": None, "data.datasets[0].subset": None},
    "qwen_fp8.py": ADAPTER,
    "qwen_nvfp4.py": ADAPTER,
}


# The other recipes each change one part, which has its own tests.
KEPT = ("llama_pretrain.py", "pretrain_stream.py")


@pytest.mark.parametrize("recipe", nightly_except(KEPT, RECIPES))
def test_trains_resumes_exactly_exports_and_loads(home, recipe):
    options = {key: str(value).format(home=home) for key, value in RECIPES[recipe].items()}
    folder, output = check_resumed_run(home, recipe, recipe.removesuffix(".py"), **options)
    adapter = "lora.rank" in RECIPES[recipe]
    if RECIPES[recipe] is ADAPTER:
        assert "is emulated on cpu" in output
    exported = home / f"{folder.name}-exported"
    call("jaxtune.export", f"--run={folder}", f"--output={exported}", *(["--merge"] if adapter else []))
    # Merging uses the weights of the file, not the weights rounded for low-precision products.
    load_in_transformers(exported, home / "model", folder / "export" if adapter else None, within=1e-4)


@pytest.mark.nightly
def test_a_decoder_inside_a_model_that_sees_trains_resumes_exactly_exports_and_loads(tmp_path):
    model = tmp_path / "model"
    save_torch_model("gemma3, inside a model that sees", model)
    byte_tokenizer(model)
    write_conversations(tmp_path / "chat.jsonl")
    folder, _ = check_resumed_run(tmp_path, "gemma3_lora.py", "gemma3", **ADAPTER)
    exported = tmp_path / "exported"
    call("jaxtune.export", f"--run={folder}", f"--output={exported}", "--merge")
    load_in_transformers(exported, model, folder / "export", within=1e-4)
    before, after = (load_file(folder / "model.safetensors") for folder in (model, exported))
    vision = [name for name in before if "vision" in name]
    assert vision and before.keys() == after.keys()
    assert all(np.array_equal(before[name], after[name]) for name in vision)


@pytest.mark.nightly
def test_the_average_of_weights_is_evaluated_and_exported(home):
    """Noise on embeddings is for training only: `evaluate` finds the run's own metrics."""
    options = {"optim.ema_decay": 0.5, "train.neftune_alpha": 5, "optim.learning_rate": 1e-3}
    folder, _ = check_resumed_run(home, "qwen_full.py", "averaged", **options)
    exported = home / "averaged-exported"
    call("jaxtune.export", f"--run={folder}", f"--output={exported}")
    one, other = (load_file(path / "model.safetensors") for path in (folder / "export", exported))
    assert all(np.array_equal(one[name], other[name]) for name in one)
    evaluated = call("jaxtune.evaluate", f"--config={folder / 'config.json'}", f"--model={exported}")
    assert abs(float(evaluated.split("eval_loss ")[1].split()[0]) - metrics(folder)[-1]["eval_loss"]) <= 1e-2


def test_a_classifier_trains_resumes_exactly_is_evaluated_and_exported(home):
    """The labels are names and are exported with the model; `generate` refuses a classifier."""
    file, rng = home / "labels.jsonl", random.Random(0)
    words = {"fruit": ["apple", "pear", "plum"], "animal": ["ox", "hen", "fox"], "metal": ["tin", "zinc", "gold"]}
    samples = [{"text": " ".join(rng.choices(words[kind], k=4)), "label": kind} for kind in [*words] * 20]
    file.write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    options = {"model.head": "classification", "data.datasets[0].path": file, "data.datasets[0].type": "classification"}
    folder, _ = check_resumed_run(home, "qwen_lora.py", "classifier", **ADAPTER, **options)
    rows = metrics(folder)
    assert all(row["documents"] > 0 and 0 <= row["accuracy"] <= 1 for row in rows if "loss" in row)
    output = call("jaxtune.evaluate", f"--run={folder}")
    assert f"eval_accuracy {rows[-1]['eval_accuracy']:.6f}" in output and "perplexity" not in output
    exported = home / "classifier-exported"
    call("jaxtune.export", f"--run={folder}", f"--output={exported}", "--merge")
    output = call("jaxtune.evaluate", f"--config={folder / 'config.json'}", f"--model={exported}")
    assert f"eval_accuracy {rows[-1]['eval_accuracy']:.6f}" in output
    for model in (folder, exported, folder / "export"):
        assert "is a classifier" in call("jaxtune.generate", f"--model={model}", "--prompt=a", code=2)
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("torch", reason="loading the results needs torch (Python 3.11 here)")
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(exported)
    assert loaded.config.id2label == {0: "animal", 1: "fruit", 2: "metal"}


@pytest.mark.nightly
def test_float16_scales_its_loss_and_says_what_it_skips(home):
    """A scale that is far too large is halved, step by step; such a step does not count as bad.

    Some linear layers are in float32.
    """
    options = {
        "model.dtype": "float16",
        "precision.recipe": "fp16",
        "precision.exclude": r"layers\.1\..*down_proj",
        "precision.fp16.loss_scale": 2.0**40,
        "precision.fp16.growth_steps": 3,
        "train.max_steps": 40,
        "train.max_bad_steps": 2,
    }
    output = call(*recipe_command(home, "qwen_lora.py", "fp16", **options))
    assert "skipped: gradients overflowed float16" in output
    rows = [row for row in metrics(home / "runs" / "fp16") if "loss" in row]
    scales = [row["loss_scale"] for row in rows]
    assert scales[0] == 2.0**40 and scales[1] == 2.0**39
    assert any(after == 2 * before for before, after in itertools.pairwise(scales))
    # Each row logs the scale that its step used, and its step counts.
    assert rows[-2]["skipped_steps"] == sum(after < before for before, after in itertools.pairwise(scales))
    assert rows[-1]["loss"] < rows[0]["loss"]
