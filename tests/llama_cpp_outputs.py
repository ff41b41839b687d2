"""Compute with a GGUF file in a real llama.cpp; run by its own Python: llama_cpp_outputs.py JOB.json OUTPUT.json.

A job is {"file", "prompts" (lists of token ids), "texts" (further prompts)}. The output is {"logprobs": for each prompt
the log-probabilities of all tokens after each of its tokens, "greedy": for each prompt the ids of the greedy
continuation without the end of text, "answers": for each text the greedy continuation}.
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
        request = urllib.request.Request(f"{server.listening_address}/completion", json.dumps(asked | more).encode())
        request.add_header("Content-Type", "application/json")
        return json.loads(urllib.request.urlopen(request).read())

    def logprobs(prompt: list[int]) -> list[float]:
        # A token that is a part of a character has none, so a letter is generated; they are of the model all the same.
        answer = complete(prompt, 1, n_probs=job["vocabulary"], logit_bias=[["e", 1e4]])
        values = {entry["id"]: entry["logprob"] for entry in answer["completion_probabilities"][0]["top_logprobs"]}
        return [values[token] for token in range(job["vocabulary"])]

    return {
        "logprobs": [[logprobs(prompt[:end]) for end in range(1, len(prompt) + 1)] for prompt in job["prompts"]],
        "greedy": [complete(prompt, NEW_TOKENS)["tokens"] for prompt in job["prompts"]],
        "answers": [complete(text, NEW_TOKENS)["content"] for text in job["texts"]],
    }


if __name__ == "__main__":
    job, output = map(Path, sys.argv[1:])
    output.write_text(json.dumps(compute(json.loads(job.read_text()))))
