"""A recipe's docstring states the memory of its step, compiled for an H100."""

import re

import pytest

pytest.importorskip("ml_collections", reason="jaxtune's own dependencies are not installed")

from compiled_steps import CONFIGS, compile_recipe_step

# recipe, model, remat, maximum gigabytes (the usable memory of a GPU of 24 or 80 GB)
RECIPES = [
    ("gemma3_lora", "Gemma 3 4B", "none", 23.9),
    ("gemma4_31b_qlora", "Gemma 4 31B", "none", 79.0),
    ("qwen3_5_lora", "Qwen3.5 9B", "block", 23.9),
]


@pytest.mark.parametrize(("recipe", "size", "remat", "most"), RECIPES)
def test_memory_is_within_the_bound_and_in_the_docstring(recipe, size, remat, most):
    compiled = compile_recipe_step(recipe, size, remat)
    peak = compiled.memory.peak / 1e9
    assert peak <= most
    assert all(kernel.spill_bytes == 0 for kernel in compiled.kernels)
    found = re.search(rf"([\d.]+) GB with\s+--config\.memory\.remat={remat}", (CONFIGS / f"{recipe}.py").read_text())
    assert found and float(found[1]) == pytest.approx(peak, rel=0.02)
