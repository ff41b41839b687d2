"""Models that fit a GPU if the host holds arrays that are not in use, as stated in the documentation."""

import re

import pytest

pytest.importorskip("ml_collections", reason="jaxtune's own dependencies are not installed")

from compiled_steps import PAGE, compile_recipe_step

from pallas_kernels.gpus import GPUS

USABLE = 0.93  # usable share of a GPU's memory, by default
FULL = ("optimizer", "master", "gradients")

# GPU, recipe, model, tokens in the row, remat, offloaded arrays
STEPS = [
    ("rtx4090", "qwen_full", "8B", 2048, "block", FULL),
    ("rtx4090", "qwen_full_8bit", "8B", 2048, "block", FULL),
    ("l40s", "qwen_qlora_nf4", "70B", 2048, "block", ("quants",)),
    ("h100", "qwen_full_8bit", "8B", 2**19, "offload", FULL),
]


@pytest.mark.parametrize(("gpu", "recipe", "size", "tokens", "remat", "parts"), STEPS)
def test_a_step_fits_and_is_in_the_readme(gpu, recipe, size, tokens, remat, parts):
    options = {f"memory__offload_{part}": "True" for part in parts}
    compiled = compile_recipe_step(recipe, size, remat, 1, rows=1, gpu=gpu, data__seq_len=str(tokens), **options)
    memory = compiled.memory
    assert memory.peak <= USABLE * GPUS[gpu].memory
    cells = f"| {GPUS[gpu].kind} | `{recipe}` | {size} | {tokens:,} | {remat} | {', '.join(parts)} |"
    print(cells, f"{memory.peak / 1e9:.1f} | {memory.host / 1e9:.1f} |")
    found = re.search(re.escape(cells) + r" ([\d.]+) \| ([\d.]+) \|", PAGE.read_text())
    assert found, (cells, memory.peak / 1e9, memory.host / 1e9)
    assert [memory.peak / 1e9, memory.host / 1e9] == pytest.approx([float(one) for one in found.groups()], rel=0.05)


def test_an_array_of_all_layers_is_in_the_hosts_memory_alone():
    """For weights, moments and gradients: every array of 36 layers that the program names is in memory space 5."""
    options = {f"memory__offload_{part}": "True" for part in FULL}
    hlo = compile_recipe_step(
        "qwen_full_8bit", "8B", "block", 1, rows=1, gpu="rtx4090", data__seq_len="2048", **options
    ).hlo
    stacks = re.findall(r"\b\w+\[36,\d{4,},\d{3,}\]\{[^}]*\}", hlo)
    assert stacks and all("S(5)" in stack for stack in stacks)
