"""Chat templates are untrusted programs: they run in Jinja's sandbox, with limits on time and output."""

import json
import re
import time
from collections.abc import Iterable, Iterator
from datetime import datetime
from itertools import accumulate
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from jaxtune.errors import UserError

MAX_SECONDS = 5.0
MAX_CHARS = 2**26
# Unicode noncharacters: no text may contain them, so they can mark the ends of {% generation %} blocks.
OPEN, CLOSE = "\ufdd0", "\ufdd1"
BEFORE_NUMBER, BEHIND_NUMBER = "\ufdd2", "\ufdd3"  # a number between them marks a message
MARKS = OPEN + CLOSE + BEFORE_NUMBER + BEHIND_NUMBER
# Rendering must give the same text every day, or a run could not be repeated: for templates, today is always this day.
_TODAY = datetime(2024, 7, 26)


class Template:
    """A compiled chat template."""

    def __init__(self, source: str):
        """Compiles it.

        Raises:
            UserError: it is not Jinja.
        """
        self._sandbox = _Sandbox()
        try:
            self._template = self._sandbox.from_string(source)
        except jinja2.TemplateError as error:
            raise UserError(f"the chat template is not valid: {error}") from None

    def render(self, **variables: Any) -> tuple[str, list[tuple[int, int]]]:
        """The text, and the (start, end) of its {% generation %} blocks in characters.

        Raises:
            UserError: the template fails, refuses what it is given, or exceeds a limit.
        """
        parts, size = [], 0
        self._sandbox.start_clock()
        try:
            for part in self._template.generate(**variables):
                self._sandbox.check_clock()
                size += len(part)
                if size > MAX_CHARS:
                    raise SecurityError(f"it writes more than {MAX_CHARS} characters")
                parts.append(part)
        except Exception as error:  # a template is a program: it can fail in any way
            raise UserError(f"the chat template fails: {error or type(error).__name__}") from error
        pieces = re.split(f"[{OPEN}{CLOSE}]", "".join(parts))
        ends = list(accumulate(map(len, pieces)))
        return "".join(pieces), [(ends[i - 1], ends[i]) for i in range(1, len(pieces), 2)]


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
        line = next(parser.stream).lineno
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
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        self.filters["tojson"] = _to_json
        self.globals.update(
            raise_exception=_raise_exception, strftime_now=_TODAY.strftime, namespace=_Namespace, dict=lambda **kw: kw
        )
        self.start_clock()

    def start_clock(self):
        self._deadline = time.thread_time() + MAX_SECONDS

    def check_clock(self):
        if time.thread_time() > self._deadline:
            raise SecurityError(f"it takes more than {MAX_SECONDS} s")

    def watch(self, iterable: Iterable[Any]) -> Iterator[Any]:
        for item in iterable:
            self.check_clock()
            yield item

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        __self.check_clock()
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and abs(right) > 64:
            raise SecurityError(f"the power {right} is too large")
        for text, count in ((left, right), (right, left)):
            if isinstance(text, str | list | tuple) and len(text) * count > MAX_CHARS:
                raise SecurityError(f"it writes more than {MAX_CHARS} characters")
        return super().call_binop(context, operator, left, right)

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        return super()._generate(_WatchLoops().visit(source), *args, **kwargs)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """Unlike Jinja's own filter, does not escape for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: str):
    raise jinja2.TemplateError(message)
