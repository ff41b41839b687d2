"""Compute with a model folder in a real vLLM; run by vLLM's own Python: vllm_outputs.py JOB.json OUTPUT.json.

A job is {"folder", "adapter" (a folder or null), "prompts" (lists of token ids)}. The output is {"logprobs": for each
prompt the log-probability of each token but the first, "greedy": for each prompt the ids of the greedy continuation},
or {"error": vLLM's own words}.
"""

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

NEW_TOKENS = 12


def compute(job: dict[str, Any]) -> dict[str, Any]:
    """Return the output of a job."""
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    supply_int4()
    adapter = None if job["adapter"] is None else LoRARequest("adapter", 1, job["adapter"])
    options = {"dtype": "bfloat16", "max_model_len": 128, "enforce_eager": True, "enable_lora": adapter is not None}
    model = LLM(job["folder"], **options)
    parameters = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, prompt_logprobs=0, ignore_eos=True)
    output: dict[str, Any] = {"logprobs": [], "greedy": []}
    # One at a time: with an adapter, vLLM 0.32 on CPUs fails on log-probabilities of several prompts.
    for prompt in job["prompts"]:
        asked = {"prompt_token_ids": prompt}
        (result,) = model.generate(asked, parameters, lora_request=adapter, use_tqdm=False)
        following = zip(prompt[1:], result.prompt_logprobs[1:], strict=True)
        output["logprobs"].append([logprobs[token].logprob for token, logprobs in following])
        output["greedy"].append(list(result.outputs[0].token_ids))
    return output


def supply_int4() -> None:
    """On CPUs without AVX-512, multiply in torch by int4 weights as vLLM has packed them for its kernel."""
    import torch
    from vllm import _custom_ops

    def multiply(input: Any, q_weight: Any, scales: Any, zeros: Any, bias: Any, **_: Any) -> Any:
        inputs = input.shape[-1]
        words = q_weight.view(-1, inputs, 2).permute(1, 0, 2).reshape(inputs, -1, 1)  # 8 outputs in a word
        codes = (words >> torch.arange(0, 32, 4)).bitwise_and(15).reshape(inputs, -1) - 8
        weight = (codes.view(len(scales), -1, codes.shape[1]) * scales[:, None]).view(inputs, -1)
        product = input @ weight.to(input.dtype)
        return product if bias is None else product + bias

    if not torch.cpu._is_avx512_supported():
        _custom_ops.cpu_gemm_wna16 = multiply


def main(job: Path, output: Path) -> None:
    """Write the output of a job."""
    try:
        written = compute(json.loads(job.read_text()))
    except Exception as error:
        traceback.print_exc()
        written = {"error": f"{type(error).__name__}: {error}"}
    output.write_text(json.dumps(written))


if __name__ == "__main__":
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # errors are raised here
    main(Path(sys.argv[1]), Path(sys.argv[2]))
