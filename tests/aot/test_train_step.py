"""The whole LoRA step of Qwen3, compiled for an H100 with a run's options."""

import re
from functools import partial

import pytest

pytest.importorskip("ml_collections", reason="jaxtune's own dependencies are not installed")

import compiled_steps
from compiled_steps import LENGTH, SIZES, check_row, products_over_needed

from jaxtune.plan.launches import read_program

compiled_step = partial(compiled_steps.compile_recipe_step, "qwen_lora")
# One size on every version of jax, because its XLA decides which call a product becomes and what it keeps in float32.
SMALL_AND_LARGE = ("0.6B", pytest.param("8B", marks=pytest.mark.every_jax))


def arrays(hlo: str) -> set[tuple[str, tuple[int, ...]]]:
    return {
        (dtype, tuple(map(int, sizes.split(",")))) for dtype, sizes in re.findall(r"\b([a-z]+\d+)\[([\d,]+)\]", hlo)
    }


@pytest.mark.parametrize(
    ("size", "remat", "gigabytes"),
    [
        ("0.6B", "none", 6.2),
        pytest.param("8B", "none", 32, marks=pytest.mark.every_jax),
        ("8B", "dots", 31),
        ("8B", "block", 20),
    ],
)
def test_memory_on_an_h100(size, remat, gigabytes):
    assert compiled_step(size, remat).memory.peak < gigabytes * 1e9


@pytest.mark.every_jax
def test_xla_recomputes_nothing_by_itself():
    """Not even if a step needs more than the GPU's memory: only memory.remat decides what is recomputed."""
    step = compiled_step("0.6B", rows=64)
    assert step.memory.peak > 80e9
    assert not re.search(r"\.remat\d* =", step.hlo)


@pytest.mark.parametrize("remat", [pytest.param("none", marks=pytest.mark.every_jax), "block"])
def test_memory_is_in_the_readme(remat):
    check_row(f"| BF16 | 8B | 2 x 2048 | {remat} |", compiled_step("8B", remat).memory)


def test_without_remat_nothing_runs_twice():
    """Attention forward, dq and dkdv, and one more forward with rematerialisation; the weights' products likewise."""
    kept, block = (compiled_step("8B", remat).custom_calls for remat in ("none", "block"))
    assert (kept["mosaic_gpu_v2"], block["mosaic_gpu_v2"]) == (3, 4)
    assert kept["__cublas$lt$matmul"] <= block["__cublas$lt$matmul"] - 6


@pytest.mark.every_jax
@pytest.mark.parametrize("size", ["0.6B", "8B"])
def test_no_product_runs_twice(size):
    """XLA of jax 0.11 would compute six of a layer's seven products a second time (host/process.py)."""
    assert products_over_needed(compiled_step(size), size, rows=4 * 2) == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize("size", SMALL_AND_LARGE)
def test_attention_is_packed_flash_attention_alone(size):
    compiled = compiled_step(size)
    assert {kernel.name for kernel in compiled.kernels} == {
        "flash_attention_forward",
        "flash_attention_dq",
        "flash_attention_dkdv",
    }
    assert all(kernel.wgmma > 0 and kernel.spill_bytes == 0 for kernel in compiled.kernels)
    # The width of the 0.6B model's queries equals a row's length, so only the 8B model can show a difference.
    queries = (2, LENGTH, 128 * SIZES[size][3])
    square = {shape for _, shape in arrays(compiled.hlo) if shape.count(LENGTH) > 1 and shape[-1] == LENGTH}
    assert not {shape for shape in square if shape[-3:] != queries}


@pytest.mark.parametrize("size", SMALL_AND_LARGE)
def test_frozen_weights_have_no_gradient(size):
    """A gradient would be a float32 array, or a bfloat16 array that is summed over the micro-batches."""
    hidden, _, intermediate, _ = SIZES[size]
    for dtype, shape in arrays(compiled_step(size).hlo):
        weight = sorted(shape[-2:]) in ([hidden, intermediate], [hidden, 151_936])
        assert not (weight and dtype == "f32"), (dtype, shape)


@pytest.mark.parametrize("size", SMALL_AND_LARGE)
def test_matrix_products_reach_cublaslt(size):
    """Products of weights: 7 linear layers a block, each with 2 adapter products, forward and backward; the head."""
    compiled = compiled_step(size)
    assert compiled.custom_calls["__cublas$lt$matmul"] >= 40
    # Apart from products and kernels, only memory that need not be zero: the stacks that a loop over the layers fills.
    assert set(compiled.custom_calls) - {"AllocateBuffer"} == {"__cublas$lt$matmul", "mosaic_gpu_v2"}
    # Any other product would be a dot in a fusion of its own.
    assert not re.search(r" dot\(", compiled.hlo)


def test_four_gpus_gather_layer_by_layer():
    # A step's inputs do not depend on rematerialisation, and this step is also compiled for other tests.
    one, four = compiled_step("0.6B"), compiled_step("0.6B", remat="block", cards=4)
    assert four.memory.arguments < 0.3 * one.memory.arguments
    assert {"all-gather", "reduce-scatter"} <= set(four.collectives)
    hidden, _, intermediate, heads = SIZES["0.6B"]
    table = 2 * 151_936 * hidden
    layer = 2 * hidden * (3 * intermediate + 128 * (2 * heads + 2 * 8))
    _, gathered = four.collectives["all-gather"]
    # The embedding once; a layer in the forward pass and, recomputed, in the backward pass; the adapters.
    assert gathered < table + 2.2 * layer


def test_products_hide_the_reduce_scatter_of_each_weight():
    """All weights of 0.6B on 8 GPUs: a layer's seven are not combined, and all but the last overlap with work."""
    program = read_program(compiled_steps.compile_recipe_step("qwen_full", "0.6B", cards=8).hlo)
    scattered = [launch for launch in program.launches if launch.kind == "reduce-scatter" and launch.count >= 28]
    beside = [{other.kind for other in launch.beside or ()} for launch in scattered]
    assert len(scattered) >= 6 and sum("product" in kinds for kinds in beside) >= 4, beside
