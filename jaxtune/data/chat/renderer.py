"""A process that renders chat templates in Jinja's sandbox, with limits on time, memory and output.

It is run as a file, so that it does not import jaxtune; `jaxtune.data.chat.sandbox` starts it. The sandbox does not
stop 'x'.ljust(10**10) or a tower of powers: Python computes each in one operation, which ends only if the system
refuses memory or ends the process.

A request is 8 bytes of length and the JSON of (template, seconds, variables). An answer is a status byte, 8 bytes of
length, and the text or the error.
"""

import json
import os
import resource
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_CHARS = 2**26  # 64 Mi characters
MAX_BYTES = 2**30  # memory of the process: enough for a text of MAX_CHARS and the pieces it is joined from
RENDERED, FAILED = b"+", b"-"
# Unicode noncharacters: no text may contain them, so they can mark the ends of {% generation %} blocks.
OPEN, CLOSE = "\ufdd0", "\ufdd1"
# The date that templates see. Rendering must give the same text every day, or a run could not be repeated.
_TODAY = datetime(2024, 7, 26)


class _Template:
    """A compiled chat template."""

    def __init__(self, source: str):
        self._sandbox = _Sandbox()
        self._template = self._sandbox.from_string(source)

    def render(self, seconds: float, variables: dict[str, Any]) -> str:
        """Return the text, with marks at the ends of its {% generation %} blocks."""
        parts, size = [], 0
        self._sandbox.start_clock(seconds)
        for part in self._template.generate(**variables):
            self._sandbox.check_clock()
            size += len(part)
            if size > MAX_CHARS:
                raise SecurityError(f"it writes more than {MAX_CHARS} characters")
            parts.append(part)
        return "".join(parts)


class _Namespace(jinja2.utils.Namespace):
    """namespace() without underscore names, which could reach into the interpreter."""

    def __setitem__(self, name: str, value: Any):
        if name.startswith("_"):
            raise SecurityError(f"a template may not set {name!r}")
        super().__setitem__(name, value)


class _Generation(Extension):
    """{% generation %} ... {% endgeneration %}: the text between them is trained."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno  # skips the tag's name
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("mark"), [], [], body).set_lineno(line)

    def mark(self, caller: jinja2.runtime.Macro) -> str:
        return OPEN + caller() + CLOSE


class _WatchLoops(NodeTransformer):
    """Makes each loop of a template check the clock."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.iter = nodes.Call(nodes.EnvironmentAttribute("watch"), [node.iter], [], None, None)
        return node


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with the functions that chat templates expect, as in transformers, and a time limit.

    The clock is checked in every iteration, call and piece of output, so that no template runs for ever.
    """

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self):
        # The options with which transformers compiles templates.
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        self.filters["tojson"] = _to_json
        self.globals.update(
            raise_exception=_raise_exception, strftime_now=_TODAY.strftime, namespace=_Namespace, dict=lambda **kw: kw
        )
        self._seconds = self._deadline = 0.0

    def start_clock(self, seconds: float):
        self._seconds, self._deadline = seconds, time.thread_time() + seconds

    def check_clock(self):
        if time.thread_time() > self._deadline:
            raise SecurityError(f"it takes more than {self._seconds:g} s")

    def watch(self, iterable: Iterable[Any]) -> Iterator[Any]:
        for item in iterable:
            self.check_clock()
            yield item

    # The underscores follow Jinja's signature: a template may pass keyword arguments named self or context.
    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        __self.check_clock()
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        # Each operation runs without a check of the clock, so large results are refused before they are computed.
        if operator == "**" and abs(right) > 64:
            raise SecurityError(f"the power {right} is too large")
        for text, count in ((left, right), (right, left)):
            if isinstance(text, str | list | tuple) and len(text) * count > MAX_CHARS:
                raise SecurityError(f"it writes more than {MAX_CHARS} characters")
        return super().call_binop(context, operator, left, right)

    # Jinja calls this between parsing and compiling.
    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        return super()._generate(_WatchLoops().visit(source), *args, **kwargs)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """Encode as JSON; unlike Jinja's filter, without escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: str):
    raise jinja2.TemplateError(message)


def _main() -> None:
    """Answer requests on standard input until it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the program handles Ctrl-C, and ends this process
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # end silently if the program was killed
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # no core file of a process that aborts
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # anything that is printed here goes to standard error, not among the answers
    templates: dict[str, _Template] = {}
    while header := sys.stdin.buffer.read(8):
        request = sys.stdin.buffer.read(int.from_bytes(header, "little"))
        status = FAILED
        try:
            source, seconds, variables = json.loads(request)
            # The sandbox checks its clock between operations; this signal ends the process during an operation.
            signal.setitimer(signal.ITIMER_PROF, 1.2 * seconds)
            if source not in templates:
                templates[source] = _Template(source)
            text = "" if variables is None else templates[source].render(seconds, variables)
            answer, status = text.encode(), RENDERED
        except MemoryError:
            answer = f"it takes more than {MAX_BYTES / 2**30:g} GiB of memory".encode()
        except UnicodeEncodeError:
            answer = b"it writes half a character (a surrogate)"
        except Exception as error:  # a template is a program: it can fail in any way
            answer = (str(error)[:1000] or type(error).__name__).encode(errors="backslashreplace")
        signal.setitimer(signal.ITIMER_PROF, 0)  # off until the next request
        answers.write(status + len(answer).to_bytes(8, "little") + answer)
        answers.flush()


if __name__ == "__main__":
    _main()
