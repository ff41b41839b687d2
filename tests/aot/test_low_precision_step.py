"""Whole steps of an 8B model in FP8 and with 8-bit AdamW, compiled for an H100; and their documented table."""

import re

import pytest

pytest.importorskip("ml_collections", reason="jaxtune's own dependencies are not installed")

from compiled_steps import SIZES, check_row, compile_recipe_step, products_over_needed

# recipe, memory.remat, rows of 2048 tokens, maximum gigabytes
STEPS = [
    ("qwen_fp8", "none", 2, 34.0),
    ("qwen_fp8", "block", 2, 22.0),
    # On every version of jax, here and below: XLA decides the dtype of sums and how much of an update is in memory.
    pytest.param("qwen_full_8bit", "block", 1, 55.0, marks=pytest.mark.every_jax),
    ("qwen_full_8bit", "block", 8, 63.0),
]


@pytest.mark.parametrize(("recipe", "remat", "rows", "most"), STEPS)
def test_memory_is_within_the_bound_and_in_the_readme(recipe, remat, rows, most):
    memory = compile_recipe_step(recipe, "8B", remat, rows=rows).memory
    assert memory.peak <= most * 1e9
    check_row(f"| `{recipe}` | {rows} x 2048 | {remat} |", memory)


# On every version of jax: they differ in the operation that copies a layer's slice.
@pytest.mark.every_jax
def test_every_product_of_a_frozen_weight_is_an_fp8_call_and_no_weight_is_copied():
    """Seven linear layers, forward and backward; only the adapters and the head are not in FP8."""
    compiled = compile_recipe_step("qwen_fp8", "8B", "none", rows=3)  # 6144 tokens, unequal to any side of a weight
    assert compiled.custom_calls["__cublas$lt$matmul$f8"] == 14
    hidden, _, intermediate, _ = SIZES["8B"]
    weights = {(a, b) for a in (1024, hidden, intermediate) for b in (1024, hidden, intermediate) if hidden in (a, b)}
    made: dict[str, int] = {}
    pattern = r"= ([a-z]+\d+\w*)\[(?:\d+,)?(\d+),(\d+)\]\{[\d,]*\} (?:copy|transpose|convert|fusion|fusion-done)\("
    for dtype, rows, columns in re.findall(pattern, compiled.hlo):
        if (int(rows), int(columns)) in weights:
            made[dtype] = made.get(dtype, 0) + 1
    # Each product may slice the stack, on some versions in a fusion with a copy; no other type of copy is allowed.
    assert made in ({"u8": 14}, {"u8": 28})
    assert not re.search(r" transpose\(%?\w*(u8|f8)", compiled.hlo)


@pytest.mark.every_jax
def test_no_product_runs_twice():
    """Adapters on FP8 products, and all weights, with the products that memory.remat=block computes again."""
    fp8 = compile_recipe_step("qwen_fp8", "8B", "none", rows=3)
    assert products_over_needed(fp8, "8B", rows=4 * 3) == pytest.approx(1, abs=0.02)
    whole = compile_recipe_step("qwen_full_8bit", "8B", "block", rows=1)
    assert products_over_needed(whole, "8B", rows=1, trained=True) == pytest.approx(1, abs=0.02)


@pytest.mark.every_jax
def test_no_gradient_is_summed_over_the_tokens_in_bfloat16():
    """Norms sum by a reduction, the embedding by token positions; long sums in bfloat16 would stop growing early."""
    hlo = compile_recipe_step("qwen_full_8bit", "8B", "block", rows=1).hlo
    assert not re.findall(r"= bf16\[[\d,]*\]\S* reduce\(.*", hlo)
    scattered = re.findall(r"= bf16\[[\d,]*\]\S* scatter\(.*", hlo)
    assert scattered and all("unique_indices=true" in line for line in scattered)


@pytest.mark.every_jax
def test_the_8_bit_update_holds_no_moments_of_all_layers_in_float32():
    memory = compile_recipe_step("qwen_full_8bit", "8B", "block", rows=1).memory
    weights = 8.19e9
    assert memory.arguments <= (2 + 2.05) * weights
    # Weights, gradients, 8-bit moments; activations, and a float32 embedding and head, take less than a byte a weight.
    assert memory.peak <= (2 + 2 + 2.05 + 1) * weights
