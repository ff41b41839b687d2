"""A real vLLM loads what jaxtune exports and computes what jaxtune computes.

Each row of vLLM's tables in docs/reference/consumers.md is a row of this test.
"""

import numpy as np
import pytest
from served_rows import FAMILIES, PROMPTS, Row, logprobs, of_prompts, write_row
from vllm_program import compute_by_vllm, find_vllm

from jaxtune.quant.options import ServeOptions

TAKES_LONG = True
COVERS = ("jaxtune/exports", "jaxtune/hf", "jaxtune/weights")

ROWS = [
    *(Row(family, "merged") for family in FAMILIES),
    *(Row(family, "adapter") for family in ("Qwen3", "Llama", "Gemma3Text")),
    *(Row(family, "adapter", refused="triton") for family in ("Qwen3Moe", "GptOss")),
    Row("Qwen3", "adapter", rank=6),  # not one of the values of --max-lora-rank
    *(Row(family, "int4") for family in ("Qwen3", "Llama", "Gemma3Text")),
    *(Row("Qwen3", "int4", ServeOptions("int4", size)) for size in (32, 64)),
    Row("Qwen3Moe", "int4", refused="No WNA16 MoE backend supports the deployment configuration"),
    Row("Qwen3", "int8", refused="Quant type (uint8b128) not supported by CPUWNA16"),
    Row("Qwen3", "nf4", refused="Unknown quantization method: bitsandbytes"),
    Row("Qwen3", "fp8", refused="CPUFp8BlockScaledMMKernel requires AMX tile support"),
    Row("Qwen3", "nvfp4", refused="Marlin FP4 not available"),
    Row("Qwen3", "mxfp4", refused="Failed to find a kernel that can implement the MXFP4 linear layer"),
]


@pytest.fixture(scope="module")
def vllm(tmp_path_factory):
    """Return the program."""
    return find_vllm(tmp_path_factory.mktemp("vllm"))


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_vllm_computes_what_jaxtune_computes(vllm, tmp_path, row):
    """Log-probabilities of prompts differ by bfloat16's rounding, and greedy answers are mostly the same.

    The rounding is measured: the largest difference between jaxtune in bfloat16 and in float32. vLLM rounds as often,
    elsewhere, so its difference may be twice as large. Rounding sends some tokens to other experts, which is no
    rounding error any more: of mixtures, a tenth of the tokens is left out. Answers change if two tokens are as likely.
    """
    exported = write_row(tmp_path, row)
    output = compute_by_vllm(vllm, tmp_path, exported.job)
    if row.refused is not None and "error" in output:  # a CPU with AMX loads more
        assert row.refused in output["error"]
        return
    assert "error" not in output, output["error"]
    documents = [prompt + answer for prompt, answer in zip(PROMPTS, output["greedy"], strict=True)]
    exact, rounded = (logprobs(exported, documents, dtype) for dtype in ("float32", "bfloat16"))
    compared = 0.9 if row.family in ("Qwen3Moe", "GptOss") else 1.0
    bound = 2 * np.quantile(abs(of_prompts(rounded) - of_prompts(exact)), compared)
    difference = np.quantile(abs(np.concatenate(output["logprobs"]) - of_prompts(exact)), compared)
    print(f"{row}: differs by {difference:.4f}, bound {bound:.4f}")
    assert difference < bound < 0.1 * np.ptp(of_prompts(exact))
    answers = zip(PROMPTS, output["greedy"], exact, strict=True)
    equal = [values[len(prompt) - 1 : -1].argmax(-1).tolist() == answer for prompt, answer, values in answers]
    assert sum(equal) >= len(PROMPTS) / 2, equal
