"""Render chat templates, which are untrusted programs, in a separate process (`jaxtune.data.chat.renderer`)."""

import atexit
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from itertools import accumulate
from pathlib import Path
from typing import Any

from jaxtune.data.chat import renderer
from jaxtune.data.chat.renderer import CLOSE, OPEN
from jaxtune.errors import UserError

MAX_SECONDS = 5.0  # of processor time for one text
BEFORE_NUMBER, BEHIND_NUMBER = "\ufdd2", "\ufdd3"  # a number between them marks a message
IMAGE = "\ufdd4"  # marks an image in the content of a message
MARKS = OPEN + CLOSE + BEFORE_NUMBER + BEHIND_NUMBER + IMAGE


class Template:
    """A compiled chat template."""

    def __init__(self, source: str):
        """Compile the template.

        Raises:
            UserError: the template is not Jinja, or exceeds a limit.
        """
        self._source = source
        try:
            _request(source, None)
        except _Failed as failed:
            raise UserError(f"the chat template is not valid: {failed}") from None

    def render(self, **variables: Any) -> tuple[str, list[tuple[int, int]]]:
        """Return the text, and the (start, end) of its {% generation %} blocks in characters.

        Raises:
            UserError: the template fails, refuses the conversation, or exceeds a limit.
        """
        try:
            text = _request(self._source, variables)
        except _Failed as failed:
            raise UserError(f"the chat template fails: {failed}") from None
        if OPEN not in text and CLOSE not in text:
            return text, []
        # The marks alternate, so every second piece is a block.
        pieces = re.split(f"[{OPEN}{CLOSE}]", text)
        ends = list(accumulate(map(len, pieces)))
        return "".join(pieces), [(ends[i - 1], ends[i]) for i in range(1, len(pieces), 2)]


class _Failed(Exception):
    """The reason why a template gives no text."""


_lock = threading.Lock()
_renderer: subprocess.Popen | None = None
"""The process that renders all templates of this process; started for the first one, and again if it has ended."""


def _request(source: str, variables: dict[str, Any] | None) -> str:
    """Send a template and its variables to the renderer, and return the text; variables None: only compile.

    Raises:
        _Failed: the renderer reports an error, or has ended.
    """
    global _renderer
    try:
        request = json.dumps((source, MAX_SECONDS, variables), default=str).encode()  # str: dates in tables
    except (RecursionError, TypeError, ValueError) as error:
        raise _Failed(f"the conversation cannot be sent to the process that renders: {error}") from None
    if len(request) > renderer.MAX_CHARS * 4:  # a character of UTF-8 has up to 4 bytes
        raise _Failed(f"the conversation has more than {renderer.MAX_CHARS * 4} bytes")
    with _lock:
        if _renderer is None:
            _renderer = _start()
        assert _renderer.stdin is not None and _renderer.stdout is not None
        try:
            _renderer.stdin.write(len(request).to_bytes(8, "little") + request)
            _renderer.stdin.flush()
            header = _renderer.stdout.read(9)  # status byte, then the length
            size = int.from_bytes(header[1:], "little")
            content = _renderer.stdout.read(size)
            if len(header) < 9 or len(content) < size:
                raise BrokenPipeError
        except BrokenPipeError:
            code = _end()
            slow = f"it takes more than {MAX_SECONDS:g} s"
            # SIGPROF is the signal of the renderer's timer.
            raise _Failed(slow if code == -signal.SIGPROF else f"its process has ended with code {code}") from None
        except BaseException:  # such as Ctrl-C: the rest of this answer would be read as the next one
            _end()
            raise
    if header[:1] != renderer.RENDERED:
        raise _Failed(content.decode())
    return content.decode()


def _start() -> subprocess.Popen:
    # -P keeps the file's folder out of sys.path: some of its files are named like modules of Python.
    command, pipe = [sys.executable, "-P", str(Path(renderer.__file__))], subprocess.PIPE
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, env=os.environ | environment)


def _end() -> int | None:
    """End the renderer, if it runs, and return its exit code."""
    global _renderer
    ended, _renderer = _renderer, None
    if ended is None:
        return None
    assert ended.stdin is not None and ended.stdout is not None
    ended.stdout.close()
    with contextlib.suppress(BrokenPipeError):
        ended.stdin.close()
    try:
        return ended.wait(1)  # it ends when its input ends
    except subprocess.TimeoutExpired:
        ended.kill()
        return ended.wait()


def _forget() -> None:
    """Forget the renderer in a forked process, because it belongs to the parent."""
    global _renderer, _lock
    _renderer, _lock = None, threading.Lock()


atexit.register(_end)
os.register_at_fork(after_in_child=_forget)
