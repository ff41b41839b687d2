"""QLoRA steps of real models compiled for an H100: their memory, and the table in the documentation.

test_train_step.py checks the rows for LoRA.
"""

import re

import pytest

pytest.importorskip("ml_collections", reason="jaxtune's own dependencies are not installed")

from compiled_steps import CONFIGS, SIZES, check_row, compile_recipe_step, products_over_needed

# recipe, model, remat, rows of 2048 tokens, maximum gigabytes
STEPS = [
    # On every version of jax, here and below: Triton kernels in a whole rematerialised step, for which XLA decides
    # what is computed twice. test_low_precision_compiled.py checks on every version where XLA gathers.
    pytest.param("qwen_qlora_nf4", "8B", "block", 2, 12.0, marks=pytest.mark.every_jax),
    ("qwen_qlora_nf4", "8B", "none", 2, 32.0),
    ("qwen_qlora_nf4", "32B", "block", 1, 28.0),
    ("qwen_qlora_nf4", "70B", "block", 1, 56.0),
    ("qwen_qlora_nvfp4", "8B", "block", 2, 13.0),
    ("qwen_qlora_fp8", "8B", "block", 2, 16.0),
    ("qwen_qlora_int8", "8B", "block", 2, 16.0),
]


@pytest.mark.parametrize(("recipe", "size", "remat", "rows", "most"), STEPS)
def test_memory_is_within_the_bound_and_in_the_readme(recipe, size, remat, rows, most):
    memory = compile_recipe_step(recipe, size, remat, rows=rows).memory
    assert memory.peak <= most * 1e9
    base = recipe.removeprefix("qwen_qlora_").upper()
    check_row(f"| {base} | {size} | {rows} x 2048 | {remat} |", memory)


@pytest.mark.parametrize(
    ("recipe", "base", "size", "experts", "widths", "most"),
    [
        pytest.param(*("qwen3_30b_a3b_qlora", "NF4", "30B-A3B", 128, "768|2048", 20), marks=pytest.mark.every_jax),
        pytest.param(*("gpt_oss_20b_lora", "MXFP4", "gpt-oss-20b", 32, "2880", 16), marks=pytest.mark.newest_jax),
    ],
)
def test_of_experts_only_the_products_that_tokens_need_are_compiled(recipe, base, size, experts, widths, most):
    """Within the given memory, and without an array of tokens, experts and features."""
    compiled = compile_recipe_step(recipe, size, "block", rows=1)
    assert compiled.memory.peak <= most * 1e9
    check_row(f"| {base} | {size} | 1 x 2048 | block |", compiled.memory)
    said = float(re.search(r"A row of 2048 tokens: ([\d.]+) GB", (CONFIGS / f"{recipe}.py").read_text())[1])
    assert said == pytest.approx(compiled.memory.peak / 1e9, rel=0.05)
    kernels = {kernel.name.partition("__")[0] for kernel in compiled.kernels}
    # Weights are decoded inside the products: none is written in 16 bits.
    assert {"grouped_quant_matmul", "grouped_quant_matmul_transposed"} <= kernels
    assert not re.search(rf"bf16\[{experts},\d+,\d+\]", compiled.hlo)
    assert all(kernel.spill_bytes == 0 for kernel in compiled.kernels)
    assert not re.search(
        rf"\[(1,)?2048,{experts},({widths})\]|\[{experts},(1,)?2048,({widths})\]\S* (dot|custom-call)", compiled.hlo
    )


MIXTURES = [
    # base, model, GPUs, maximum gigabytes
    ("BF16", "30B-A3B", 1, 64.0),
    ("NF4", "GLM-4.5-Air", 8, 22.0),
    ("NF4", "235B-A22B", 8, 40.0),
]


@pytest.mark.parametrize(("base", "size", "cards", "most"), MIXTURES)
def test_a_large_mixture_fits_as_the_readme_says(base, size, cards, most):
    """With the recipe of Qwen3-30B-A3B: on one GPU in bfloat16, or on eight, which share the weights."""
    format = "None" if base == "BF16" else base.lower()
    compiled = compile_recipe_step("qwen3_30b_a3b_qlora", size, "block", cards, rows=1, quant__format=format)
    assert compiled.memory.peak <= most * 1e9
    assert all(kernel.spill_bytes == 0 for kernel in compiled.kernels)
    check_row(f"| {base} | {size} | {cards} | 1 x 2048 | block |", compiled.memory)


@pytest.mark.parametrize("remat", ["none", pytest.param("block", marks=pytest.mark.every_jax)])
def test_a_weight_is_dequantized_for_each_product_and_never_kept(remat):
    """Seven linear layers, forward and backward: a recomputed forward pass shares the backward's dequantized weight."""
    compiled = compile_recipe_step("qwen_qlora_nf4", "8B", remat)
    kernels = [kernel.name for kernel in compiled.kernels]
    assert any("dequantize" in name for name in kernels)
    assert all(kernel.spill_bytes == 0 for kernel in compiled.kernels)
    attention = sum(count for name, count in compiled.custom_calls.items() if name.startswith("mosaic_gpu"))
    assert attention == {"none": 3, "block": 4}[remat]
    assert compiled.custom_calls["__gpu$xla.gpu.triton"] == 2 * 7
    # No array holds a layer's weight in bfloat16 for every layer, and no weight has a float32 copy.
    hidden, layers, intermediate, _ = SIZES["8B"]
    assert not re.search(rf"bf16\[{layers},({hidden},{intermediate}|{intermediate},{hidden})\]", compiled.hlo)
    assert not re.search(rf"f32\[({hidden},{intermediate}|{intermediate},{hidden})\]", compiled.hlo)
    assert compiled.custom_calls["__cublas$lt$matmul"] >= 40


@pytest.mark.every_jax
def test_no_product_runs_twice():
    compiled = compile_recipe_step("qwen_qlora_nf4", "8B", "none")
    assert products_over_needed(compiled, "8B", rows=4 * 2) == pytest.approx(1, abs=0.02)


def test_four_gpus_gather_codes_not_weights():
    one, four = (
        compile_recipe_step("qwen_qlora_nf4", "8B", "block"),
        compile_recipe_step("qwen_qlora_nf4", "8B", "block", cards=4),
    )
    assert four.memory.arguments < 0.3 * one.memory.arguments
    hidden, _, intermediate, heads = SIZES["8B"]
    layer = hidden * (3 * intermediate + 128 * (2 * heads + 2 * 8))
    table = 2 * 151_936 * hidden
    _, gathered = four.collectives["all-gather"]
    # Embedding and head; a layer's codes and scales in the forward pass and at most twice in the recomputed; adapters.
    assert gathered < 2.1 * table + 3 * 0.52 * layer + 0.1 * layer
