"""Completions by an OpenAI-compatible inference server, such as vLLM.

Prompts and completions are sent as tokens, never as text, so that training sees exactly the sampled tokens. The tokens
of an answer are checked.
"""

import hashlib
import math
import time
from collections.abc import Collection, Sequence
from types import NoneType
from typing import Any

from jaxtune.data.chat.messages import clip
from jaxtune.errors import UserError
from jaxtune.inference.generation import Completion
from jaxtune.models.structure.model_spec import ModelSpec
from jaxtune.rollout.routed_experts_field import read_routed_experts
from jaxtune.rollout.server_pool import ServerPool
from jaxtune.rollout.server_request import Wait, call, entries_of, in_parallel, not_openai

ROUTED_BYTES = 12
"""Bytes of the number of an expert, an integer of 64 bits at most, in base64."""


def complete(
    servers: ServerPool,
    model: str | None,
    prompts: Sequence[Sequence[int]],
    numbers: Sequence[int],
    written: Sequence[int] | None = None,
    *,
    vocabulary: int,
    max_tokens: int,
    temperature: float,
    top_p: float,
    top_k: int,
    min_p: float,
    repetition_penalty: float,
    stop: Collection[int],
    strings: Collection[str] = (),
    seed: int,
    log_probs: bool = False,
    routed: ModelSpec | None = None,
    timeout: float,
    wait: Wait = time.sleep,
) -> list[Completion]:
    """Request a completion of each prompt; return the completions in order.

    Args:
        servers: Servers; each completes a part of the prompts.
        model: The servers' name for the model: the base model, or an adapter by the name that send_adapter returns.
            None: the base model, by whatever name a vLLM serves it.
        prompts: Tokens of each prompt.
        numbers: A number for each prompt, which determines its random numbers together with `seed`. The same prompt
            with another number gets another completion.
        written: Number of tokens at the end of each prompt that its completion already has; None: none.
        vocabulary: The model's number of tokens; larger token ids are refused.
        max_tokens: Maximum number of tokens of each completion.
        temperature: Sampling temperature; 0 takes the likeliest token.
        top_p: Nucleus sampling; 1 is off.
        top_k: Number of likeliest tokens to sample from; 0 is off.
        min_p: Minimum probability relative to the likeliest token's; 0 is off.
        repetition_penalty: Penalty of repeated tokens; 1 is off.
        stop: Tokens that end a completion. vLLM also stops at the end tokens in the model's generation_config.json.
        strings: Texts that end a completion and are kept at its end.
        seed: Seed shared by all prompts.
        log_probs: Whether completions have the log-probabilities of their tokens. vLLM computes them before the
            temperature and other sampling options, unless it was started with --logprobs-mode=processed_logprobs.
        routed: The model, if completions have the experts of each token; None: they have not.
        timeout: Seconds within which a completion must arrive, including its time in the server's queue.
        wait: Function that sleeps between attempts.

    Raises:
        UserError: No server can be reached, or one refuses, takes too long, or returns invalid tokens.
    """
    # Name every option, because the server takes missing ones from the model's generation_config.json.
    sampling = {
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stop_token_ids": sorted(stop),
        **({"stop": list(strings), "include_stop_str_in_output": True} if strings else {}),
        **({"logprobs": 1} if log_probs else {}),  # 0 would do for vLLM; other servers take it for "no"
    }

    def one(url: str, index: int) -> Completion:
        there = written[index] if written else 0
        # One prompt a request: a request has one seed, so equal prompts in it would get equal completions.
        body = {
            **({} if model is None else {"model": model}),
            "prompt": [list(prompts[index])],
            "n": 1,
            "max_tokens": max_tokens - there,
            "seed": _seed(seed, numbers[index], there),
            "return_token_ids": True,
            **sampling,
        }
        most = len(prompts[index]) + max_tokens - there
        more = 0 if routed is None else most * math.prod(routed.routed_shape) * ROUTED_BYTES
        answer = call(url, "v1/completions", body, timeout, wait, more_bytes=more)
        completion, routing = _completion(url, answer, log_probs)
        if len(completion.tokens) > max_tokens - there:
            raise UserError(
                f"{url} returned {len(completion.tokens)} tokens; at most {max_tokens - there} were requested"
            )
        if unknown := [token for token in completion.tokens if not 0 <= token < vocabulary]:
            text = f"the model has tokens 0 to {vocabulary - 1}; does the server serve this model?"
            raise UserError(f"{url} returned token {clip(str(unknown[0]))}: {text}")
        if routed is None:
            return completion
        read = len(prompts[index]) + len(completion.tokens) - 1
        return completion._replace(routed_experts=read_routed_experts(url, routing, read, routed))

    return in_parallel(lambda index: servers.ask(index, lambda url: one(url, index)), len(prompts), servers)


def _seed(seed: int, number: int, written: int) -> int:
    """Return the seed of a prompt's request, a hash, so that runs with neighbouring seeds share no random numbers."""
    named = f"{seed}/{number}" + (f"/{written}" if written else "")
    return int.from_bytes(hashlib.sha256(named.encode()).digest()[:6], "big")


def _completion(url: str, body: bytes, log_probs: bool) -> tuple[Completion, Any]:
    """Return the completion of an answer, and its field routed_experts."""
    choices = entries_of(url, body, "choices")
    if len(choices) != 1:
        raise not_openai(url, body)
    tokens, reason = choices[0].get("token_ids"), choices[0].get("finish_reason")
    if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
        raise UserError(
            f"{url} does not return the tokens of completions (return_token_ids); vLLM does since version 0.10.2"
        )
    if reason not in ("stop", "length"):
        shown = clip(repr(reason))
        raise UserError(f"{url} ended a completion with finish_reason={shown}, which is neither 'stop' nor 'length'")
    scores = _log_probs(url, choices[0], len(tokens)) if log_probs else ()
    return Completion(tokens, reason == "stop", scores), choices[0].get("routed_experts")


def _log_probs(url: str, choice: dict[str, Any], count: int) -> list[float]:
    """Return the log-probabilities of a completion's tokens; NaN for null, and for -inf as it would have no ratio."""
    field = choice.get("logprobs")
    values = field.get("token_logprobs") if isinstance(field, dict) else None
    if (
        not isinstance(values, list)
        or len(values) != count
        or not all(type(x) in (int, float, NoneType) for x in values)
    ):
        raise UserError(
            f"{url} does not return the log-probability of each token (logprobs), which rollout.correction needs; "
            "rollout.correction='none' trains without it"
        )
    return [value if value is not None and math.isfinite(value) else math.nan for value in values]
