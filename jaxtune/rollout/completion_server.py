"""A client of an OpenAI-compatible inference server, such as vLLM, which generates completions and loads weights.

Prompts and completions are sent as tokens, never as text, so that training sees exactly the sampled tokens. The key in
the environment variable OPENAI_API_KEY is sent with every request. The server is not trusted: answers are limited in
bytes and time, and their tokens are checked.
"""

import contextlib
import hashlib
import http.client
import io
import json
import math
import os
import re
import socket
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, InvalidStateError
from pathlib import Path
from queue import Empty, SimpleQueue
from types import NoneType
from typing import Any, TypeVar

import numpy as np

from jaxtune.data.chat.messages import clip
from jaxtune.errors import UserError, printable
from jaxtune.hf.peft import CONFIG, WEIGHTS
from jaxtune.inference.generation import Completion
from jaxtune.models.spec import ModelSpec
from jaxtune.rollout.routed_experts_field import read_routed_experts
from jaxtune.rollout.server_pool import ServerPool, Unreachable

PARALLEL = 256
"""Number of concurrent requests: the default number of sequences in a batch of vLLM."""
PAUSES = (1.0, 2.0, 4.0, 8.0, 16.0)
"""Seconds to wait before each retry, if the server could not be reached or was too busy."""
MAX_BYTES = 2**24
"""Limit of an answer's size; an answer of 100,000 tokens, with its text and its prompt, takes a tenth of it."""
SCORE_BYTES = 200
"""Bytes of a token's log-probability in JSON, with its rank and its text."""
ROUTED_BYTES = 12
"""Bytes of the number of an expert, an integer of 64 bits at most, in base64."""
RELOAD, FORGET = "collective_rpc", "reset_prefix_cache"
"""Endpoints of vLLM that exist with VLLM_SERVER_DEV_MODE=1."""
_TOO_BUSY = (429, 502, 503, 504)

Wait = Callable[[float], None]
T = TypeVar("T")


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
        answer = _call(url, "v1/completions", body, timeout, wait, more_bytes=more)
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

    return _in_parallel(lambda index: servers.ask(index, lambda url: one(url, index)), len(prompts), servers)


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
        answer = _call(url, "v1/completions", body, timeout, wait, more_bytes=more)
        choices = _entries(url, answer, "choices")
        field = choices[0].get("prompt_logprobs") if len(choices) == 1 else None
        try:
            ranked = [
                sorted((int(of["rank"]), int(token), float(of["logprob"])) for token, of in place.items())[:top_k]
                for place in (field or ())[1:]
            ]
        except (TypeError, ValueError, LookupError, AttributeError) as error:
            raise _not_openai(url, answer) from error
        if len(ranked) != len(prompt) - 1 or any(len(place) != top_k for place in ranked):
            raise UserError(f"{url} does not return the {top_k} likeliest tokens (prompt_logprobs) at each token")
        table = np.array(ranked, np.float64).reshape(-1, top_k, 3)  # rank, token, log-probability
        tokens, scores = table[..., 1].astype(np.int64), table[..., 2]
        if np.isnan(scores).any():
            raise _not_openai(url, answer)
        if tokens.min(initial=0) < 0 or tokens.max(initial=0) >= vocabulary:
            raise UserError(
                f"{url} returned tokens {tokens.min()} to {tokens.max()}: the student has tokens 0 to "
                f"{vocabulary - 1}; take a teacher of the student's family"
            )
        return tokens, scores

    return _in_parallel(lambda index: servers.ask(index, lambda url: one(url, index)), len(prompts), servers)


def _in_parallel(one: Callable[[int], T], count: int, servers: ServerPool) -> list[T]:
    """Return one(0), one(1), ..., called in up to PARALLEL threads; after an error, what has not begun is dropped.

    The threads are daemons: a process that ends does not wait for answers. With an executor it would. Once `servers`
    is closed, nothing waits for answers, and the threads drop them.
    """
    futures, numbers = [Future[T]() for _ in range(count)], SimpleQueue[int]()
    for number in range(count):
        numbers.put(number)

    def work() -> None:
        with contextlib.suppress(Empty):
            while True:
                number = numbers.get_nowait()
                with contextlib.suppress(InvalidStateError):  # cancelled: nothing waits for it any more
                    try:
                        futures[number].set_result(one(number))
                    except BaseException as error:  # raised by `result`
                        futures[number].set_exception(error)

    try:
        with servers.awaiting(futures):
            for _ in range(min(PARALLEL, count)):
                threading.Thread(target=work, name="completion", daemon=True).start()
            return [future.result() for future in futures]
    finally:
        with contextlib.suppress(Empty):
            while True:
                numbers.get_nowait()


def send_adapter(url: str, name: str, folder: Path, *, timeout: float = 300.0, wait: Wait = time.sleep) -> str:
    """Load the PEFT adapter in `folder` on the server, in place of earlier adapters of `name`.

    The server reads the folder itself, and may read it again later. The adapter's name on the server ends in a digest
    of its files, because vLLM caches prefixes by an adapter's name, even if its weights have changed.

    Args:
        url: Address of the server.
        name: Name of the run; two runs with the same name would unload each other's adapters.
        folder: Folder with adapter_config.json and adapter_model.safetensors; the server must see it at the same path.
        timeout: Seconds within which the adapter must be loaded.
        wait: Function that sleeps between attempts.

    Returns:
        The model name to request completions with.

    Raises:
        UserError: The folder is not an adapter's, or the server cannot be reached or does not load the adapter.
    """
    served = f"{name}-{_digest(folder)}"
    # Unload first: with --max-loras=1 loading evicts the earlier adapter, which vLLM then fails to unload. Unload even
    # an adapter with the same digest, because an earlier run may have loaded it from a folder that is gone.
    for entry in _entries(url, _call(url, "v1/models", None, timeout, wait), "data"):
        if re.fullmatch(rf"{re.escape(name)}-[0-9a-f]{{12}}", str(entry.get("id"))):
            _call(url, "v1/unload_lora_adapter", {"lora_name": entry["id"]}, timeout, wait, fine=(404,))
    _call(url, "v1/load_lora_adapter", {"lora_name": served, "lora_path": str(folder.resolve())}, timeout, wait)
    return served


def send_weights(url: str, folder: Path, *, timeout: float, wait: Wait = time.sleep) -> None:
    """Load the safetensors in `folder` on a vLLM, in place of all weights that it has.

    The server reads the folder itself. It also forgets the prefixes that it computed with the weights before.

    Args:
        url: Address of the server, which must not be completing anything.
        folder: Folder with the safetensors of a whole model; the server must see it at the same path.
        timeout: Seconds within which the weights must be loaded.
        wait: Function that sleeps between attempts.

    Raises:
        UserError: The server cannot be reached, does not load the weights, or is busy with other requests.
    """
    body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder.resolve())}}
    _call(url, RELOAD, body, timeout, wait)
    for pause in (*PAUSES, None):
        answer = _call(url, FORGET, {}, timeout, wait)
        if _succeeded(url, answer):
            return
        if pause is not None:
            wait(pause)
    raise UserError(
        f"{url} does not forget the prefixes that it computed with earlier weights, because it is busy with other "
        "requests; a server of rollout.server must serve only this run"
    )


def _succeeded(url: str, body: bytes) -> bool:
    """Return whether an answer says "success"; a vLLM that does not say it has succeeded."""
    try:
        return json.loads(body or b"{}").get("success", True) is True
    except (ValueError, AttributeError, RecursionError) as error:
        raise _not_openai(url, body) from error


def _seed(seed: int, number: int, written: int) -> int:
    """Return the seed of a prompt's request, a hash, so that runs with neighbouring seeds share no random numbers."""
    named = f"{seed}/{number}" + (f"/{written}" if written else "")
    return int.from_bytes(hashlib.sha256(named.encode()).digest()[:6], "big")


def _completion(url: str, body: bytes, log_probs: bool) -> tuple[Completion, Any]:
    """Return the completion of an answer, and its field routed_experts."""
    choices = _entries(url, body, "choices")
    if len(choices) != 1:
        raise _not_openai(url, body)
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


def _digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for file in (CONFIG, WEIGHTS):
        try:
            digest.update((folder / file).read_bytes())
        except OSError as error:
            raise UserError(f"{folder} is not an adapter's folder: {file}: {error.strerror or error}") from error
    return digest.hexdigest()[:12]


def _call(
    url: str,
    endpoint: str,
    body: dict[str, Any] | None,
    timeout: float,
    wait: Wait,
    fine: Collection[int] = (),
    more_bytes: int = 0,
) -> bytes:
    """Send POST /endpoint, or GET without a body, with retries, and return the answer.

    `fine`: status codes that count as success. `more_bytes`: by which an answer may exceed MAX_BYTES.
    """
    request = _request(url, endpoint, body)
    for pause in (*PAUSES, None):
        try:
            status, answer = _answer(request, timeout, MAX_BYTES + more_bytes)
        except (OSError, http.client.HTTPException) as error:
            cause = getattr(error, "reason", error)
            if isinstance(cause, TimeoutError):
                raise Unreachable(f"{request.full_url} did not answer within {timeout:g} seconds") from error
            problem = f"cannot be reached: {_clip(str(cause)) or type(cause).__name__}"
        else:
            if status < 300 or status in fine:
                return answer
            problem = f"answers {status}: {_message(answer)}"
            if status not in _TOO_BUSY:
                raise UserError(f"{request.full_url} {problem}{_advice(endpoint, status)}")
        if pause is not None:
            wait(pause)
    raise Unreachable(f"{request.full_url} {problem} ({len(PAUSES) + 1} attempts in {sum(PAUSES):g} seconds)")


def _request(url: str, endpoint: str, body: dict[str, Any] | None) -> urllib.request.Request:
    if not _is_address(url):
        shown = url.rpartition("@")[2]  # the part before the @ may be a password
        raise UserError(f"{shown!r} is not the address of a server; use one like http://localhost:8000, without a user")
    request = urllib.request.Request(f"{url.rstrip('/').removesuffix('/v1')}/{endpoint}")
    if body is not None:
        request.data = json.dumps(body).encode()
        request.add_header("Content-Type", "application/json")
    if key := os.environ.get("OPENAI_API_KEY", "").strip():
        if not key.isascii() or not key.isprintable():
            raise UserError("OPENAI_API_KEY has characters that cannot be sent in a header")
        request.add_unredirected_header("Authorization", f"Bearer {key}")  # never sent to a redirect's target
    return request


def _is_address(url: str) -> bool:
    try:
        parts = urllib.parse.urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and "@" not in url and parts.port != 0
    except ValueError:  # the port is not a number
        return False


class _InTime(io.RawIOBase):
    """A socket's stream that must end within the socket's timeout, which by itself limits only each single read."""

    def __init__(self, stream: io.RawIOBase, connection: socket.socket):
        self._stream, self._connection = stream, connection
        self._deadline = time.monotonic() + (connection.gettimeout() or 0.0)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._connection.settimeout(left)
        return self._stream.readinto(buffer)

    def close(self) -> None:
        self._stream.close()
        super().close()


class _Response(http.client.HTTPResponse):
    def __init__(self, sock: socket.socket, *arguments: Any, **named: Any):
        super().__init__(sock, *arguments, **named)
        self.fp = io.BufferedReader(_InTime(self.fp.detach(), sock))


class _Plain(http.client.HTTPConnection):
    response_class = _Response


class _Secure(http.client.HTTPSConnection):
    response_class = _Response


class _Connect(urllib.request.HTTPHandler, urllib.request.HTTPSHandler):
    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_Plain, req)

    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_Secure, req)


def _answer(request: urllib.request.Request, timeout: float, limit: int) -> tuple[int, bytes]:
    response: Any  # an HTTPError is a response, too
    try:
        response = urllib.request.build_opener(_Connect).open(request, timeout=timeout)
    except urllib.error.HTTPError as error:
        response = error
    with response:
        content = response.read(limit + 1)
        if len(content) > limit:
            raise UserError(f"{request.full_url} answers with more than {limit} bytes")
        if response.length:  # bytes of Content-Length still missing; `read` with a size does not check this itself
            raise http.client.IncompleteRead(content, response.length)
        return response.status, content


def _entries(url: str, body: bytes, key: str) -> list[dict[str, Any]]:
    try:
        entries = json.loads(body)[key]
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise _not_openai(url, body) from error
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise _not_openai(url, body)
    return entries


def _not_openai(url: str, body: bytes) -> UserError:
    return UserError(
        f"{url} does not answer as an OpenAI-compatible server: {_clip(body.decode(errors='replace'), 80)}"
    )


def _message(body: bytes) -> str:
    """Return the server's error message, which servers put under different keys."""
    text = body.decode(errors="replace").strip()
    try:
        message = json.loads(text)
    except (ValueError, RecursionError):
        return _clip(text)
    for key in ("error", "message", "detail"):
        if isinstance(message, dict) and key in message:
            message = message[key]
    return _clip(str(message))


def _clip(text: str, limit: int = 500) -> str:
    return printable(clip(text, limit))


def _advice(endpoint: str, status: int) -> str:
    if status in (401, 403):
        return "; the key is taken from the environment variable OPENAI_API_KEY"
    if endpoint in ("v1/load_lora_adapter", "v1/unload_lora_adapter"):
        return (
            "; start vLLM with VLLM_ALLOW_RUNTIME_LORA_UPDATING=True in its environment, --enable-lora, and a "
            "--max-lora-rank of at least the adapter's rank, on a machine that can read the adapter's folder"
        )
    if endpoint in (RELOAD, FORGET):
        return (
            "; to train all weights, start vLLM with VLLM_SERVER_DEV_MODE=1 in its environment, on a machine that can "
            "read the run's folder; or set lora.enabled, because adapters need no such server"
        )
    return ""
