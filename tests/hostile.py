"""Mutations of real files, drawn by hypothesis, and the outcome a user sees when they are read."""

import contextlib
import copy
import io
import json
import os
import resource
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from jaxtune.command import run_guarded
from jaxtune.terminal import REFUSED

SECONDS, BYTES = 30.0, 2**30
"""Limits for reading one input: time, and memory beyond the process's own."""
LONGEST = 20_000
"""Characters of a message, which may list many faults."""

CANARY = Path(f"/tmp/jaxtune_canary_{os.getpid()}")
"""A file that code in an input would make."""
_TOUCH = f"touch {CANARY}"
CODE = (
    f"__import__('os').system('{_TOUCH}')",
    "{{ cycler.__init__.__globals__.os.system('" + _TOUCH + "') }}",
    "{% for c in ''.__class__.__mro__[1].__subclasses__() %}{{ c('" + _TOUCH + "', shell=true) }}{% endfor %}",
    f"$({_TOUCH})",
    f"!!python/object/apply:os.system ['{_TOUCH}']",
)
_DEEP = "DEEP_LISTS"  # replaced in a file by 5,000 nested lists
VALUES = st.one_of(
    st.sampled_from([None, True, False, -1, 0, 1, 2, 3, 2**31, 2**63, 10**12, 10**400, 0.5, -0.0, 1e308, 1e-320]),
    st.sampled_from([float("nan"), float("inf"), [], {}, [[]], [None], {"a": None}, _DEEP, [0] * 10_000]),
    st.sampled_from(
        ["", "x" * 100_000, "a\0b", "\x1b[2J", "../../etc/passwd", "/etc/passwd", "\ud800", "é\u202e", "7"]
    ),
    st.sampled_from(CODE),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
        max_leaves=6,
    ),
)


def encode_text(text: str) -> bytes:
    """Encode a text as the bytes of a file."""
    return text.replace(json.dumps(_DEEP), _DEEP).replace(_DEEP, "[" * 5000 + "]" * 5000).encode(errors="surrogatepass")


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the paths of the values inside a JSON value; of a long list only the first and last entries."""
    keys = list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    for key in keys[:40] + keys[40:][-5:]:
        yield (*path, key)
        yield from _places(value[key], (*path, key))


@st.composite
def mutated_values(draw, good: Any, changes: int = 3) -> Any:
    """Draw a JSON value with some parts replaced, removed, added, or exchanged."""
    mutated = copy.deepcopy(good)
    for _ in range(draw(st.integers(1, changes))):
        places = list(_places(mutated))
        if not places:
            return copy.deepcopy(draw(VALUES))
        *path, last = draw(st.sampled_from(places))
        holder = mutated
        for key in path:
            holder = holder[key]
        match draw(st.sampled_from(("replace", "replace", "remove", "add", "exchange"))):
            case "replace":
                holder[last] = copy.deepcopy(draw(VALUES))
            case "remove":
                del holder[last]
            case "add" if isinstance(holder, dict):
                holder[draw(st.text(max_size=8) | st.sampled_from(CODE))] = copy.deepcopy(draw(VALUES))
            case "add":
                holder.insert(last, copy.deepcopy(draw(VALUES)))
            case "exchange":
                value = mutated
                for key in draw(st.sampled_from(places)):
                    with contextlib.suppress(LookupError, TypeError):  # the paths are older than the change
                        value = value[key]
                holder[last] = copy.deepcopy(value)
    return mutated


@st.composite
def damaged_bytes(draw, good: bytes) -> bytes:
    """Draw bytes with some changed, cut off, repeated or added."""
    content = bytearray(good)
    for _ in range(draw(st.integers(1, 4))):
        first, last = sorted(draw(st.tuples(*[st.integers(0, len(content))] * 2)))
        match draw(st.sampled_from(("flip", "flip", "cut", "repeat", "insert"))):
            case "flip" if content:
                content[min(first, len(content) - 1)] ^= 1 << draw(st.integers(0, 7))
            case "cut":
                del content[first:last]
            case "repeat":
                content[first:first] = content[first : min(last, first + 1000)]
            case "insert":
                content[first:first] = draw(st.binary(max_size=16) | st.sampled_from([t.encode() for t in CODE]))
    return bytes(content)


def json_files(good: Any) -> st.SearchStrategy[bytes]:
    """Draw JSON with other values in it, or, one time in five, damaged bytes."""
    text = json.dumps(good).encode()
    return st.integers(0, 4).flatmap(
        lambda n: mutated_values(good).map(json.dumps).map(encode_text) if n else damaged_bytes(text)
    )


class Outcomes:
    """Counts of used and refused inputs of one kind, and the slowest read."""

    def __init__(self, kind: str):
        self.kind, self.counts, self.slowest, self.messages = kind, Counter[str](), 0.0, set[str]()

    def read(self, read: Callable[[], Any]) -> str | None:
        """Read as a command does; return the message if the input is refused, None if it is used.

        Raises AssertionError for more than one message, for a slow input, and if code of the input ran. Exceptions of
        `read`
        other than UserError pass through, such as MemoryError.
        """
        shown, start = io.StringIO(), time.monotonic()
        with _limited(), contextlib.redirect_stderr(shown), contextlib.redirect_stdout(io.StringIO()):
            code = run_guarded(lambda: read() and None)
        self.slowest = max(self.slowest, seconds := time.monotonic() - start)
        assert seconds < SECONDS
        assert not CANARY.exists(), "code in the input ran"
        self.counts["refused" if code else "used"] += 1
        if not code:
            return None
        message = shown.getvalue()
        assert code == REFUSED and len(message) < LONGEST
        assert "jaxtune: error: " in message and "Traceback" not in message
        return message

    def __str__(self):
        return (
            f"{self.kind}: {self.counts['used']} used, {self.counts['refused']} refused, at most {self.slowest:.1f} s"
        )


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    """Limit the process to BYTES more memory than it has; a larger request raises MemoryError."""
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (size + BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
