"""Chat templates are untrusted programs: a process of their own renders them (`jaxtune.data.chat.renderer`)."""

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

MAX_SECONDS = 5.0
BEFORE_NUMBER, BEHIND_NUMBER = "\ufdd2", "\ufdd3"  # a number between them marks a message
MARKS = OPEN + CLOSE + BEFORE_NUMBER + BEHIND_NUMBER


class Template:
    """A chat template that has been compiled."""

    def __init__(self, source: str):
        """Compiles it.

        Raises:
            UserError: it is not Jinja, or exceeds a limit.
        """
        self._source = source
        try:
            _answer(source, None)
        except _Failed as failed:
            raise UserError(f"the chat template is not valid: {failed}") from None

    def render(self, **variables: Any) -> tuple[str, list[tuple[int, int]]]:
        """The text, and the (start, end) of its {% generation %} blocks in characters.

        Raises:
            UserError: the template fails, refuses what it is given, or exceeds a limit.
        """
        try:
            text = _answer(self._source, variables)
        except _Failed as failed:
            raise UserError(f"the chat template fails: {failed}") from None
        if OPEN not in text and CLOSE not in text:
            return text, []
        pieces = re.split(f"[{OPEN}{CLOSE}]", text)
        ends = list(accumulate(map(len, pieces)))
        return "".join(pieces), [(ends[i - 1], ends[i]) for i in range(1, len(pieces), 2)]


class _Failed(Exception):
    """Why a template gives no text."""


_lock = threading.Lock()
_renderer: subprocess.Popen | None = None
"""The process that renders for this one, for all of its templates; started by the first, and again if it has ended."""


def _answer(source: str, variables: dict[str, Any] | None) -> str:
    """What the renderer makes of a template and its variables; it only compiles without. Raises _Failed."""
    global _renderer
    try:
        asked = json.dumps((source, MAX_SECONDS, variables), default=str).encode()  # dates of a table are written out
    except (RecursionError, TypeError, ValueError) as error:
        raise _Failed(f"the conversation cannot be sent to the process that renders: {error}") from None
    if len(asked) > renderer.MAX_CHARS * 4:
        raise _Failed(f"the conversation has more than {renderer.MAX_CHARS * 4} bytes")
    with _lock:
        if _renderer is None:
            _renderer = _start()
        assert _renderer.stdin is not None and _renderer.stdout is not None
        try:
            _renderer.stdin.write(len(asked).to_bytes(8, "little") + asked)
            _renderer.stdin.flush()
            header = _renderer.stdout.read(9)
            size = int.from_bytes(header[1:], "little")
            content = _renderer.stdout.read(size)
            if len(header) < 9 or len(content) < size:
                raise BrokenPipeError
        except BrokenPipeError:
            code = _end()
            slow = f"it takes more than {MAX_SECONDS:g} s"
            raise _Failed(slow if code == -signal.SIGPROF else f"its process has ended with code {code}") from None
        except BaseException:  # half an answer, such as after Ctrl-C, would be taken for the next one's
            _end()
            raise
    if header[:1] != renderer.RENDERED:
        raise _Failed(content.decode())
    return content.decode()


def _start() -> subprocess.Popen:
    # -P: the folder of the file has modules with names of Python's own.
    command, pipe = [sys.executable, "-P", str(Path(renderer.__file__))], subprocess.PIPE
    more = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, env=os.environ | more)


def _end() -> int | None:
    """Ends the renderer, if there is one, and returns its exit code."""
    global _renderer
    ended, _renderer = _renderer, None
    if ended is None:
        return None
    assert ended.stdin is not None and ended.stdout is not None
    ended.stdout.close()
    with contextlib.suppress(BrokenPipeError):
        ended.stdin.close()
    try:
        return ended.wait(1)  # it ends once it has no more to read; what it computes then is nobody's
    except subprocess.TimeoutExpired:
        ended.kill()
        return ended.wait()


def _forget() -> None:
    """In a forked process: the renderer is the parent's."""
    global _renderer, _lock
    _renderer, _lock = None, threading.Lock()


atexit.register(_end)
os.register_at_fork(after_in_child=_forget)
