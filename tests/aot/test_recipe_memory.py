"""A recipe's docstring states the memory of its step, compiled for an H100."""

import re

import pytest

pytest.importorskip("ml_collections", reason="jaxtune's own dependencies are not installed")

from compiled_steps import CONFIGS, compile_recipe_step

from jaxtune.config import load_recipe, resolve
from jaxtune.plan.prediction import TargetGpus, predict

# recipe, model, remat, rows of 2048 tokens, maximum gigabytes (the usable memory of a GPU of 24 or 80 GB)
RECIPES = [
    ("gemma3_lora", "Gemma 3 4B", "none", 2, 23.9),
    ("gemma4_31b_qlora", "Gemma 4 31B", "none", 2, 79.0),
    ("gemma4_lora", "google/gemma-4-26B-A4B-it", "block", 2, 79.0),
    ("nemotron3_lora", "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "block", 1, 79.0),
    ("qwen3_5_27b_qlora", "Qwen/Qwen3.5-27B", "none", 2, 79.0),
    ("qwen3_5_lora", "Qwen3.5 9B", "block", 2, 23.9),
]


def stated(recipe: str, condition: str) -> float:
    """Return the gigabytes that a recipe's docstring states before `condition`, a regex."""
    found = re.search(rf"([\d.]+) GB {condition}", (CONFIGS / f"{recipe}.py").read_text())
    assert found, f"configs/{recipe}.py states no memory {condition}"
    return float(found[1])


@pytest.mark.parametrize(("recipe", "size", "remat", "rows", "most"), RECIPES)
def test_memory_is_within_the_bound_and_in_the_docstring(recipe, size, remat, rows, most):
    compiled = compile_recipe_step(recipe, size, remat, rows=rows)
    peak = compiled.memory.peak / 1e9
    assert peak <= most
    assert all(kernel.spill_bytes == 0 for kernel in compiled.kernels)
    assert stated(recipe, rf"(?:on an H100|with\s+--config\.memory\.remat={remat})") == pytest.approx(peak, rel=0.02)


@pytest.mark.parametrize("recipe", ["qwen_decision", "qwen_grpo_tools", "qwen_int4"])
def test_a_plan_needs_what_the_docstring_says(recipe):
    """Beside the step, the answers that are sampled."""
    plan = predict(resolve(load_recipe(recipe), recipe, []), TargetGpus("h100"))
    assert stated(recipe, r"on an H100, according to\s+the compiler") == pytest.approx(plan.needed / 1e9, rel=0.02)
