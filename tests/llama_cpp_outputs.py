"""Compute with a GGUF file in a real llama.cpp; run by its own Python: llama_cpp_outputs.py JOB.json OUTPUT.json.

A job is {"file", "prompts" (lists of token ids, each a whole character or more), "texts" (further prompts)}. The output
is {"logprobs": for each prompt the log-probability of each token but the first, "greedy": for each prompt the ids of
the greedy continuation without the end of text, "answers": for each text the greedy continuation}.
"""

import json
import sys
import urllib.request
from pathlib import Path
from typing import Any

NEW_TOKENS = 12


def compute(job: dict[str, Any]) -> dict[str, Any]:
    """Return the output of a job."""
    import xllamacpp

    options = xllamacpp.CommonParams()
    options.model.path, options.n_ctx, options.n_parallel, options.port = job["file"], 256, 1, 0
    options.cpuparams.n_threads = options.cpuparams_batch.n_threads = 1  # threads wait for each other by spinning
    server = xllamacpp.Server(options)

    def complete(prompt: list[int] | str, tokens: int, **more: Any) -> dict[str, Any]:
        asked = {"prompt": prompt, "n_predict": tokens, "temperature": 0, "ignore_eos": True, "return_tokens": True}
        asked["cache_prompt"] = False  # its checkpoints of earlier prompts are wrong for layers with windows
        request = urllib.request.Request(f"{server.listening_address}/completion", json.dumps(asked | more).encode())
        request.add_header("Content-Type", "application/json")
        return json.loads(urllib.request.urlopen(request).read())

    def logprob(prompt: list[int], following: int) -> float:
        # It is generated, for which it must be whole characters; the log-probability is the model's all the same.
        (generated,) = complete(prompt, 1, n_probs=1, logit_bias=[[following, 1e4]])["completion_probabilities"]
        assert generated["id"] == following
        return generated["logprob"]

    return {
        "logprobs": [
            [logprob(prompt[:end], prompt[end]) for end in range(1, len(prompt))] for prompt in job["prompts"]
        ],
        "greedy": [complete(prompt, NEW_TOKENS)["tokens"] for prompt in job["prompts"]],
        "answers": [complete(text, NEW_TOKENS, ignore_eos=False)["content"] for text in job["texts"]],
    }


if __name__ == "__main__":
    job, output = map(Path, sys.argv[1:])
    output.write_text(json.dumps(compute(json.loads(job.read_text()))))
