"""Requests to an OpenAI-compatible inference server, such as vLLM: many at a time, with retries.

The key in the environment variable OPENAI_API_KEY is sent with every request. The server is not trusted: answers are
limited in bytes and time.
"""

import contextlib
import http.client
import io
import json
import os
import socket
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Collection
from concurrent.futures import Future, InvalidStateError
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from jaxtune.data.chat.messages import clip
from jaxtune.errors import UserError, printable
from jaxtune.rollout.server_pool import ServerPool, Unreachable

PARALLEL = 256
"""Number of concurrent requests: the default number of sequences in a batch of vLLM."""
PAUSES = (1.0, 2.0, 4.0, 8.0, 16.0)
"""Seconds to wait before each retry, if the server could not be reached or was too busy."""
MAX_BYTES = 2**24
"""Limit of an answer's size; an answer of 100,000 tokens, with its text and its prompt, takes a tenth of it."""
RELOAD, FORGET = "collective_rpc", "reset_prefix_cache"
"""Endpoints of vLLM that exist with VLLM_SERVER_DEV_MODE=1."""
_TOO_BUSY = (429, 502, 503, 504)

Wait = Callable[[float], None]
T = TypeVar("T")


def in_parallel(one: Callable[[int], T], count: int, servers: ServerPool) -> list[T]:
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


def call(
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


def entries_of(url: str, body: bytes, key: str) -> list[dict[str, Any]]:
    """Return the objects in a list of an answer. Raises UserError if there is no such list."""
    try:
        entries = json.loads(body)[key]
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise not_openai(url, body) from error
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise not_openai(url, body)
    return entries


def not_openai(url: str, body: bytes) -> UserError:
    """Return the error for an answer that does not have the form of OpenAI's."""
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
