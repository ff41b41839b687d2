"""Rows whose positions are sharded over eight H100s that are not there: memory, and what devices exchange."""

import re

import pytest

pytest.importorskip("ml_collections", reason="jaxtune's own dependencies are not installed")

from compiled_steps import README, SIZES, compiled_step

GPUS, MILLION = 8, 2**20
FULL_AT_MOST = 56e9  # bytes a GPU, of the same row of the same model in TRL's guide to long contexts


@pytest.mark.parametrize("recipe", ["qwen_full", "qwen_full_8bit"])
def test_a_row_of_a_million_tokens_fits_and_is_in_the_readme(recipe):
    options = {"mesh__sequence": str(GPUS), "data__seq_len": str(MILLION)}
    memory = compiled_step(recipe, "8B", "offload", GPUS, 1, **options).memory
    assert memory.peak <= FULL_AT_MOST
    row = re.search(rf"\| `{recipe}` \| 1,048,576 \| ([\d.]+) \| ([\d.]+) \|", README.read_text())
    assert row, f"| `{recipe}` | 1,048,576 | {memory.peak / 1e9:.1f} | {memory.host / 1e9:.1f} |"
    assert [memory.peak / 1e9, memory.host / 1e9] == pytest.approx([float(row[1]), float(row[2])], rel=0.05)


@pytest.mark.every_jax
def test_devices_exchange_positions_for_heads_and_nothing_else_of_a_row():
    """Queries, keys, values and outputs, forward, again in the block's recomputation, and their gradients."""
    options = {"mesh__sequence": str(GPUS), "data__seq_len": "65536"}
    compiled = compiled_step("qwen_lora", "8B", "block", GPUS, 1, **options)
    exchanges, size = compiled.collectives["all-to-all"]
    assert exchanges == 12
    heads = SIZES["8B"][3] + 2 * 8 + SIZES["8B"][3]
    assert size == 3 * 65536 // GPUS * heads * 128 * 2
    gathered = re.findall(r"= \(?(\w+\[[\d,]+\]).* all-gather", compiled.hlo)
    assert not [shape for shape in gathered if "65536" in shape and not shape.startswith("s32")], gathered
