"""An impossible config is refused by name before data or weights are read, and nothing is destroyed."""

import re

import pytest
from runs import CONFIGS, call, recipe_command, write_model_folder


@pytest.fixture(scope="module")
def trained(home):
    """Train all weights for two steps, without validation data; return (options, output)."""
    options = {"train.max_steps": 2, "optim.learning_rate": 1e-3, "data.validation_split": 0}
    return options, call(*recipe_command(home, "qwen_full.py", "resumed", **options))


def test_what_a_run_is_made_of_is_neither_overwritten_nor_exchanged(home):
    """An export onto the base model or the run is refused, and so is a base that has changed since training."""
    call(*recipe_command(home, "qwen_lora.py", "guarded", **{"train.max_steps": 2, "data.validation_split": 0}))
    adapter, weights = home / "runs" / "guarded", home / "model" / "model.safetensors"
    before = weights.read_bytes()
    export = ("jaxtune.export", f"--run={adapter}")
    assert "started from" in call(*export, f"--output={home / 'model'}", "--merge", code=2)
    assert "folder of a run" in call(*export, f"--output={adapter}", code=2)
    weights.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
    try:
        output = call("jaxtune.generate", f"--model={adapter}", "--prompt=a", code=2)
    finally:
        weights.write_bytes(before)
    assert "model.safetensors has other content" in output


def test_another_optimizer_on_resume_is_refused_by_name(home, trained):
    options = trained[0] | {"train.max_steps": 4, "optim.name": "lion"}
    output = call(*recipe_command(home, "qwen_full.py", "resumed", **options), code=2)
    assert "optim.name: 'adamw' then, 'lion' now" in output


# recipe, options, parts of the message
REFUSED = {
    "a decay that ends before warm-up": (
        "qwen_lora.py",
        {"optim.schedule": "linear", "optim.warmup_ratio": 0.0, "optim.warmup_steps": 5, "optim.decay_ratio": 0.5},
        ["optim.decay_ratio=0.5 of 8 steps is over before warm-up is"],
    ),
    "a typo": ("qwen_lora.py", {"optim.lerning_rate": 1}, ["optim.learning_rate"]),
    "nothing left to quantize": (
        "qwen_qlora_nf4.py",
        {"lora.rank": 4, "quant.skip_first_layers": 2},
        ["quant leaves out every linear layer"],
    ),
    "a quantized base that is trained": (
        "qwen_qlora_nf4.py",
        {"lora.enabled": False},
        ["quantized weights are frozen"],
    ),
}


@pytest.mark.parametrize(("recipe", "options", "parts"), REFUSED.values(), ids=REFUSED)
def test_is_refused_by_name(home, recipe, options, parts):
    output = call(*recipe_command(home, recipe, "refused", **options), code=2)
    assert all(part in output for part in parts), output


def test_a_pattern_that_matches_nothing_is_refused_before_data_is_read(home):
    options = {"optim.lr_multipliers": "('lm_haed=2',)", "data.datasets[0].path": home / "absent.jsonl"}
    output = call(*recipe_command(home, "qwen_lora.py", "unmatched", **options), code=2)
    assert "optim.lr_multipliers" in output and "lm_haed" in output and "absent.jsonl" not in output


# recipe, width of a model that does not fit it, patterns of the message
MISFITS = {
    "a matrix without whole blocks of 16": ("qwen_fp8.py", 40, [r"precision\.recipe='fp8_hybrid'", "q_proj"]),
    "a matrix without whole blocks of 64": (
        "qwen_qlora_nf4.py",
        96,
        ["blocks of 1 x 64 do not divide", r"--config\.quant\.exclude='[a-z_|]*gate_proj\|k_proj\|"],
    ),
}


@pytest.mark.parametrize(("recipe", "width", "patterns"), MISFITS.values(), ids=MISFITS)
def test_a_model_of_other_sizes_is_refused_by_name(home, recipe, width, patterns):
    small = home / f"hidden-{width}"
    write_model_folder(small, hidden_size=width)
    arguments = recipe_command(home, recipe, "refused")
    arguments[1] = f"--config={CONFIGS / recipe}:{small}"
    output = call(*arguments, code=2)
    assert all(re.search(pattern, output) for pattern in patterns), output


def test_a_model_that_is_not_there_is_said(home):
    arguments = recipe_command(home, "qwen_lora.py", "absent")
    arguments[1] = f"--config={CONFIGS / 'qwen_lora.py'}:{home / 'modle'}"
    output = call(*arguments, code=2)
    assert "modle" in output and "model" in output


def test_prepare_shows_what_is_trained(home):
    output = call("jaxtune.prepare", *recipe_command(home, "qwen_lora.py", "shown")[1:], "--show=2")
    assert "documents" in output and "<|im_end|>" in output


def test_a_recipes_own_eval_steps_are_left_out_where_there_is_nothing_to_evaluate(trained):
    """A setting of the recipe that an override makes ineffective gives a notice of one line."""
    notes = [line for line in trained[1].splitlines() if line.startswith("left out: ")]
    assert len(notes) == 1 and "recipe: eval.steps = 100: has no effect" in notes[0]
