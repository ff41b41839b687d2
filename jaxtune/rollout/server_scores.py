"""Log-probabilities of the tokens of a prompt by a vLLM server."""

import time
from collections.abc import Sequence

import numpy as np

from jaxtune.errors import UserError
from jaxtune.rollout.server_pool import ServerPool
from jaxtune.rollout.server_request import Wait, call, entries_of, in_parallel, not_openai

SCORE_BYTES = 200
"""Bytes of a token's log-probability in JSON, with its rank and its text."""


def score_prompts(
    servers: ServerPool,
    prompts: Sequence[Sequence[int]],
    top_k: int,
    *,
    vocabulary: int,
    timeout: float,
    wait: Wait = time.sleep,
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the likeliest tokens in place of each token but the first of each prompt, and their log-probabilities.

    Args:
        servers: vLLM servers.
        prompts: Tokens of each prompt.
        top_k: Number of likeliest tokens; vLLM allows as many as its --max-logprobs.
        vocabulary: The student's number of tokens; larger token ids are refused.
        timeout: Seconds within which an answer must arrive.
        wait: Function that sleeps between attempts.

    Returns:
        Arrays (tokens less 1, top_k) of each prompt, float64, likeliest first.

    Raises:
        UserError: No server can be reached, or one refuses, takes too long, or does not return these scores.
    """

    def one(url: str, index: int) -> tuple[np.ndarray, np.ndarray]:
        prompt = list(prompts[index])
        body = {"prompt": [prompt], "n": 1, "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": top_k}
        body |= {"seed": 0, "stop_token_ids": []}
        more = len(prompt) * (top_k + 1) * SCORE_BYTES
        answer = call(url, "v1/completions", body, timeout, wait, more_bytes=more)
        choices = entries_of(url, answer, "choices")
        field = choices[0].get("prompt_logprobs") if len(choices) == 1 else None
        try:
            ranked = [
                sorted((int(of["rank"]), int(token), float(of["logprob"])) for token, of in place.items())[:top_k]
                for place in (field or ())[1:]
            ]
        except (TypeError, ValueError, LookupError, AttributeError) as error:
            raise not_openai(url, answer) from error
        if len(ranked) != len(prompt) - 1 or any(len(place) != top_k for place in ranked):
            raise UserError(f"{url} does not return the {top_k} likeliest tokens (prompt_logprobs) at each token")
        table = np.array(ranked, np.float64).reshape(-1, top_k, 3)  # rank, token, log-probability
        tokens, scores = table[..., 1].astype(np.int64), table[..., 2]
        if np.isnan(scores).any():
            raise not_openai(url, answer)
        if tokens.min(initial=0) < 0 or tokens.max(initial=0) >= vocabulary:
            raise UserError(
                f"{url} returned tokens {tokens.min()} to {tokens.max()}: the student has tokens 0 to "
                f"{vocabulary - 1}; take a teacher of the student's family"
            )
        return tokens, scores

    return in_parallel(lambda index: servers.ask(index, lambda url: one(url, index)), len(prompts), servers)
