"""An answer's text, thought and tool calls, which are parsed in the form in which the chat template writes calls.

The form is found by rendering a call. The results equal those of TRL's `parse_response` with its response templates.
"""

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxtune import hf
from jaxtune.data.chat.chat_template import ChatTemplate
from jaxtune.data.chat.messages import Message, clip
from jaxtune.errors import UserError
from jaxtune.tokenizer_type import Tokenizer

NAME, KEY, VALUE = "jaxtune_probe_name", "jaxtune_probe_key", "jaxtune_probe_value"
_PROBE: list[Message] = [
    {"role": "user", "content": "a"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": NAME, "arguments": {KEY: VALUE}}}],
    },
]

# The JSON schemas of the arguments of each tool, by the names of tool and argument.
Schemas = Mapping[str, Mapping[str, Any]]
Calls = list[tuple[str, Any]]


@dataclass(frozen=True)
class CallForm:
    """A form in which chat templates write tool calls.

    Attributes:
        written: matches the probe in this form.
        pattern: matches a call, or all calls of an answer, in the text of an answer.
        calls: (match, schemas) -> names and arguments of the calls. Raises ValueError for a malformed call.
    """

    written: str
    pattern: str
    calls: Callable[[re.Match[str], Schemas], Calls]


def _json(match: re.Match[str], schemas: Schemas) -> Calls:
    return [_named(json.loads(match["call"]))]


def _json_list(match: re.Match[str], schemas: Schemas) -> Calls:
    return [_named(call) for call in json.loads(match["calls"])]


def _json_arguments(match: re.Match[str], schemas: Schemas) -> Calls:
    return [(match["name"], json.loads(match["arguments"]))]


def _tags(match: re.Match[str], schemas: Schemas) -> Calls:
    """Read arguments as text between tags. A value is text if the tool says so; otherwise JSON, if it is JSON."""
    name = match["name"]
    pairs = re.findall(_PARAMETER, match["arguments"], re.DOTALL) or re.findall(
        _ARGUMENT, match["arguments"], re.DOTALL
    )
    return [(name, {key: _parse_value(value, schemas.get(name, {}).get(key, {})) for key, value in pairs})]


def _python(match: re.Match[str], schemas: Schemas) -> Calls:
    """Read a Python list of calls with literal keyword arguments, which are not executed."""
    try:
        listed = ast.parse(match["calls"].strip(), mode="eval").body
    except SyntaxError as error:
        raise ValueError(str(error)) from error
    calls: Calls = []
    for call in listed.elts if isinstance(listed, ast.List) else ():
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
            raise ValueError("not a call with keyword arguments")
        calls.append((call.func.id, {str(one.arg): ast.literal_eval(one.value) for one in call.keywords}))
    return calls


def _named(call: Any) -> tuple[str, Any]:
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise ValueError("not an object with a name")
    arguments = call.get("arguments")
    return call["name"], {} if arguments is None else arguments


def _parse_value(text: str, schema: Mapping[str, Any]) -> Any:
    if schema.get("type") == "string":
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


_PARAMETER = r"<parameter=([^>\n]+)>\s*(.*?)\s*</parameter>"
_ARGUMENT = r"<arg_key>([^<]+)</arg_key>\s*<arg_value>(.*?)</arg_value>"
FORMS = {
    "JSON in tags (Qwen, Hermes)": CallForm(
        r"<tool_call>\s*\{", r"\n?<tool_call>\s*(?P<call>.*?)\s*</tool_call>\s*", _json
    ),
    "XML in tags (Qwen3.5, Nemotron 3)": CallForm(
        rf"<tool_call>\s*<function={NAME}>",
        r"\n*<tool_call>\s*<function=(?P<name>[^\n>]+)>(?P<arguments>.*?)</tool_call>\s*",
        _tags,
    ),
    "keys and values in tags (GLM-4.5)": CallForm(
        rf"<tool_call>{NAME}", r"\n?<tool_call>(?P<name>[^\s<]+)\s*(?P<arguments>.*?)</tool_call>\s*", _tags
    ),
    "one JSON object (Llama 3)": CallForm(
        rf'\{{"name": "{NAME}", "parameters":',
        r'^\{"name":\s*"(?P<name>[^"]+)",\s*"parameters":\s*(?P<arguments>\{.*\})\}\s*$',
        _json_arguments,
    ),
    "a JSON list (Mistral)": CallForm(r"\[TOOL_CALLS\] ?\[", r"\[TOOL_CALLS\]\s*(?P<calls>\[.*\])", _json_list),
    "Python calls (LFM2)": CallForm(
        rf"<\|tool_call_start\|>\[{NAME}\(", r"<\|tool_call_start\|>(?P<calls>\[.*?\])<\|tool_call_end\|>\s*", _python
    ),
    "a channel (gpt-oss)": CallForm(
        rf"to=functions\.{NAME}",
        r"(?:<\|start\|>assistant)? ?to=functions\.(?P<name>\S+?)<\|channel\|>commentary\s+json<\|message\|>"
        r"(?P<arguments>.*?)(?:<\|call\|>|$)",
        _json_arguments,
    ),
    "an action (ReAct, ToolBench)": CallForm(
        rf"Action: {NAME}\nAction Input:",
        r"\n?Action: (?P<name>[^\n]+)\nAction Input: (?P<arguments>.*)",
        _json_arguments,
    ),
}
_ANALYSIS = re.compile(r"<\|channel\|>analysis<\|message\|>(.*?)(?:<\|end\|>|$)", re.DOTALL)
_FINAL = re.compile(r"<\|channel\|>(?:final|commentary)<\|message\|>(.*?)(?:<\|return\|>|<\|end\|>|$)", re.DOTALL)


_OPENER = 8  # tokens at the end of a prompt that hold "<think>" and a line break


class AnswerParser:
    """Parses the tokens of an answer into a message of the assistant."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, calls: bool):
        """Find the form in which the template writes calls, unless no answer has `calls`.

        A tokenizer with a `response_template` is parsed by transformers.

        Raises:
            UserError: the template does not write calls, or in an unknown form.
        """
        self._tokenizer = tokenizer
        self._own = calls and bool(getattr(tokenizer, "response_template", None))
        self._form = _form_of(template) if calls and not self._own else None

    def __call__(self, tokens: Sequence[int], stop: bool, prompt: Sequence[int], tools: Sequence[Any]) -> Message:
        """Return the message: `content`, and if there are any `reasoning_content` or `thinking`, and `tool_calls`.

        An answer with a malformed call is text without calls, as in TRL.

        Args:
            tokens: of the answer.
            stop: whether the last token ends the answer and is no part of its text.
            prompt: the tokens before it.
            tools: JSON schemas of the tools.
        """
        plain: Message = {"role": "assistant", "content": hf.decode(self._tokenizer, tokens, skip_special_tokens=True)}
        try:
            if self._own:
                parsed: Any = self._tokenizer.parse_response(list(tokens), prefix=list(prompt), tools=list(tools))
                return {"role": "assistant"} | parsed | {"content": parsed.get("content") or ""}
            # Some templates begin the thought themselves. Until it is closed, everything is thought.
            begins = hf.decode(self._tokenizer, prompt[-_OPENER:]).rstrip().endswith("<think>")
            text = hf.decode(self._tokenizer, tokens[: len(tokens) - stop])
            return self._parse(text, _schemas(tools), plain, begins)
        except (ValueError, TypeError, AttributeError, RecursionError, MemoryError):  # the last two: of deep nesting
            return plain

    def _parse(self, text: str, schemas: Schemas, plain: Message, thinks: bool) -> Message:
        message, rest = dict(plain), text
        channels = "<|channel|>" in text
        if channels:
            if thought := "".join(_ANALYSIS.findall(text)):
                message["thinking"] = thought
        elif "</think>" in text or thinks:
            thought, _, rest = text.partition("</think>")
            if thought := thought.strip().removeprefix("<think>").strip():
                message["reasoning_content"] = thought
            rest = rest.lstrip()
        matches = [] if self._form is None else list(re.finditer(self._form.pattern, rest, re.DOTALL))
        calls = [call for match in matches for call in self._form.calls(match, schemas)] if self._form else []
        if calls:
            rest = rest[: matches[0].start()]
            named = [{"name": name, "arguments": arguments} for name, arguments in calls]
            message["tool_calls"] = [{"type": "function", "function": function} for function in named]
        if channels:
            message["content"] = "".join(_FINAL.findall(text))
        elif rest != text:
            message["content"] = rest
        return message


def _form_of(template: ChatTemplate) -> CallForm:
    text = template.text(_PROBE)
    if not all(part in text for part in (NAME, KEY, VALUE)):
        raise UserError(
            "the chat template writes no tool calls, which rollout.tools and rollout.environment need; choose another "
            "chat.template, such as qwen3_nothinking, or set chat.agent_template='hermes'"
        )
    for form in FORMS.values():
        if re.search(form.written, text):
            return form
    written = clip(text[max(0, text.index(NAME) - 40) :], 160)
    raise UserError(
        f"the chat template writes a tool call as {written!r}, a form that jaxtune does not parse; known forms are "
        f"{', '.join(FORMS)}"
    )


def _schemas(tools: Sequence[Any]) -> Schemas:
    functions = [tool.get("function", tool) for tool in tools]
    return {one["name"]: (one.get("parameters") or {}).get("properties", {}) for one in functions}
