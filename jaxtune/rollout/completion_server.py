"""A client of an OpenAI-compatible server that generates, such as vLLM: completions of tokens, adapters in use.

Tokens go out and come back, never text, so that what is trained on is what was sampled. A key in the environment
variable OPENAI_API_KEY is sent with every request. The server is not trusted: an answer has limits in bytes and time,
and its tokens are checked.
"""

import hashlib
import http.client
import io
import json
import os
import re
import socket
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from jaxtune.data.chat.messages import clip
from jaxtune.errors import UserError, printable
from jaxtune.hf.peft import CONFIG, WEIGHTS
from jaxtune.inference.generation import Completion

PARALLEL = 256
"""Requests under way at once: as many sequences as vLLM has in a batch, unless it is told otherwise."""
PAUSES = (1.0, 2.0, 4.0, 8.0, 16.0)
"""Seconds before a request is sent again, if the server could not be reached or was too busy."""
MAX_BYTES = 2**24
"""Of an answer; one of 100,000 tokens, with its text and its prompt, is a tenth of that."""
_TOO_BUSY = (429, 502, 503, 504)

Wait = Callable[[float], None]


def complete(
    url: str,
    model: str,
    prompts: Sequence[Sequence[int]],
    numbers: Sequence[int],
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
    timeout: float,
    wait: Wait = time.sleep,
) -> list[Completion]:
    """A completion of each prompt, in order; the same prompt with another number gets another.

    Args:
        url: of the server, as in http://localhost:8000.
        model: as the server calls it: the base model, or an adapter by the name that send_adapter returns.
        prompts: their tokens.
        numbers: of each, which with `seed` says what its random numbers are.
        vocabulary: of the model; no token may be beyond it.
        max_tokens: of each completion.
        temperature: 0 takes the likeliest token.
        top_p: 1 leaves none out.
        top_k: 0 leaves none out.
        min_p: 0 leaves none out.
        repetition_penalty: 1 is none.
        stop: tokens that end a completion. vLLM also stops at those of the model's generation_config.json.
        strings: texts that end a completion, and are the end of it.
        seed: of them all.
        timeout: seconds until a completion must be there, its time in the server's queue included.
        wait: sleeps between attempts.

    Raises:
        UserError: the server cannot be reached, refuses, takes too long, or does not return the tokens it should.
    """
    # What is left out here the server takes from the model's generation_config.json.
    sampling = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stop_token_ids": sorted(stop),
        **({"stop": list(strings), "include_stop_str_in_output": True} if strings else {}),
    }

    def one(index: int) -> Completion:
        # The seed is the request's, so prompts that shared one would, where equal, get equal completions.
        body = {
            "model": model,
            "prompt": [list(prompts[index])],
            "n": 1,
            "seed": _seed(seed, numbers[index]),
            "return_token_ids": True,
            **sampling,
        }
        completion = _completion(url, _called(url, "completions", body, timeout, wait))
        if len(completion.tokens) > max_tokens:
            raise UserError(f"{url} returned {len(completion.tokens)} tokens, of {max_tokens} that were asked for")
        if strange := [token for token in completion.tokens if not 0 <= token < vocabulary]:
            text = f"the model has tokens 0 to {vocabulary - 1}; is that the model which the server serves?"
            raise UserError(f"{url} returned token {clip(str(strange[0]))}: {text}")
        return completion

    pool = ThreadPoolExecutor(PARALLEL, thread_name_prefix="completion")
    try:
        return list(pool.map(one, range(len(prompts))))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # after an error, what has not begun never does


def send_adapter(url: str, name: str, folder: Path, *, timeout: float = 300.0, wait: Wait = time.sleep) -> str:
    """Has the server load the PEFT adapter in `folder` in place of the earlier ones of `name`; the model to ask for.

    The server reads the folder itself, and may read it again later. An adapter is called by its name and a digest of
    its files, since vLLM finds cached prefixes by an adapter's name, whatever its weights have become.

    Args:
        url: of the server.
        name: of the run; two runs of one name would unload each other's adapters.
        folder: with adapter_config.json and adapter_model.safetensors, at the same path for the server.
        timeout: seconds until the adapter must be loaded.
        wait: sleeps between attempts.

    Raises:
        UserError: it is not an adapter's folder; the server cannot be reached, or does not load the adapter.
    """
    served = f"{name}-{_digest(folder)}"
    # Unloaded first, since with --max-loras=1 loading evicts the earlier one, which vLLM then fails to unload. The same
    # one too, which an earlier run may have loaded from a folder that is gone.
    for entry in _entries(url, _called(url, "models", None, timeout, wait), "data"):
        if re.fullmatch(rf"{re.escape(name)}-[0-9a-f]{{12}}", str(entry.get("id"))):
            _called(url, "unload_lora_adapter", {"lora_name": entry["id"]}, timeout, wait, fine=(404,))
    _called(url, "load_lora_adapter", {"lora_name": served, "lora_path": str(folder.resolve())}, timeout, wait)
    return served


def _seed(seed: int, number: int) -> int:
    """Of a prompt's request; another for each number, and nothing like those of the next seed."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{number}".encode()).digest()[:6], "big")


def _completion(url: str, body: bytes) -> Completion:
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
    return Completion(tokens, finished=reason == "stop")


def _digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for file in (CONFIG, WEIGHTS):
        try:
            digest.update((folder / file).read_bytes())
        except OSError as error:
            raise UserError(f"{folder} is not an adapter's folder: {file}: {error.strerror or error}") from error
    return digest.hexdigest()[:12]


def _called(
    url: str, endpoint: str, body: dict[str, Any] | None, timeout: float, wait: Wait, fine: Collection[int] = ()
) -> bytes:
    """What the server answers to POST /v1/endpoint, or to GET without a body, once it has an answer."""
    request = _request(url, endpoint, body)
    for pause in (*PAUSES, None):
        try:
            status, answer = _answer(request, timeout)
        except (OSError, http.client.HTTPException) as error:
            cause = getattr(error, "reason", error)
            if isinstance(cause, TimeoutError):
                raise UserError(f"{request.full_url} did not answer within {timeout:g} seconds") from error
            problem = f"cannot be reached: {_shown(str(cause)) or type(cause).__name__}"
        else:
            if status < 300 or status in fine:
                return answer
            problem = f"answers {status}: {_message(answer)}"
            if status not in _TOO_BUSY:
                raise UserError(f"{request.full_url} {problem}{_advice(endpoint, status)}")
        if pause is not None:
            wait(pause)
    raise UserError(f"{request.full_url} {problem} ({len(PAUSES) + 1} attempts in {sum(PAUSES):g} seconds)")


def _request(url: str, endpoint: str, body: dict[str, Any] | None) -> urllib.request.Request:
    if not _is_address(url):
        shown = url.rpartition("@")[2]  # what stands before may be a password
        raise UserError(f"{shown!r} is not the address of a server; one is as http://localhost:8000, without a user")
    request = urllib.request.Request(f"{url.rstrip('/').removesuffix('/v1')}/v1/{endpoint}")
    if body is not None:
        request.data = json.dumps(body).encode()
        request.add_header("Content-Type", "application/json")
    if key := os.environ.get("OPENAI_API_KEY", "").strip():
        if not key.isascii() or not key.isprintable():
            raise UserError("OPENAI_API_KEY has characters that cannot be sent in a header")
        request.add_unredirected_header("Authorization", f"Bearer {key}")  # no other server gets the key
    return request


def _is_address(url: str) -> bool:
    try:
        parts = urllib.parse.urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and "@" not in url and parts.port != 0
    except ValueError:  # of a port that is no number
        return False


class _InTime(io.RawIOBase):
    """A socket's stream that has to end within the socket's timeout, which otherwise is that of each of its bytes."""

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


def _answer(request: urllib.request.Request, timeout: float) -> tuple[int, bytes]:
    response: Any  # of an error too, which stands for it
    try:
        response = urllib.request.build_opener(_Connect).open(request, timeout=timeout)
    except urllib.error.HTTPError as error:
        response = error
    with response:
        content = response.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise UserError(f"{request.full_url} answers with more than {MAX_BYTES} bytes")
        if response.length:  # of what Content-Length says; `read` with a size leaves that to the caller
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
        f"{url} does not answer as an OpenAI-compatible server: {_shown(body.decode(errors='replace'), 80)}"
    )


def _message(body: bytes) -> str:
    """The server's own words, which stand in one of several places."""
    text = body.decode(errors="replace").strip()
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return _shown(text)
    for key in ("error", "message", "detail"):
        if isinstance(found, dict) and key in found:
            found = found[key]
    return _shown(str(found))


def _shown(text: str, limit: int = 500) -> str:
    return printable(clip(text, limit))


def _advice(endpoint: str, status: int) -> str:
    if status in (401, 403):
        return "; the environment variable OPENAI_API_KEY is sent as its key"
    if endpoint in ("load_lora_adapter", "unload_lora_adapter"):
        return (
            "; start vLLM with VLLM_ALLOW_RUNTIME_LORA_UPDATING=True in its environment, --enable-lora, and a "
            "--max-lora-rank of no less than the adapter's rank, where it can read the adapter's folder"
        )
    return ""
