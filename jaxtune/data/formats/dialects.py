"""Convert conversations in the layouts of other toolkits to OpenAI's: a list of {role, content}.

Unknown layouts are returned unchanged, and `messages.check_messages` reports them.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from jaxtune.data.chat.messages import clip
from jaxtune.errors import UserError

# Pairs of columns that hold a conversation together: texts of ERNIEKit, and lists of messages of TRL.
QUERIES_AND_ANSWERS = ("src", "tgt")
PROMPT_AND_COMPLETION = ("prompt", "completion")
# LLaMA-Factory's column of the exchanges before an instruction.
HISTORY = "history"

_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "bot": "assistant",
    **dict.fromkeys(("observation", "observations", "function_response", "tool_response"), "tool"),
}
_CALLS = ("function_call", "tool_call")


def messages_in(sample: Mapping[str, Any], columns: tuple[str, ...], renamed: Mapping[str, str]) -> Any:
    """Return the conversation in a sample's columns, one column or one of the pairs above, as a list of messages.

    Supported layouts: {role, content}, as a list or its JSON text; ShareGPT's {from, value}, with function_call and
    observation; one object for both sides of an exchange, {human, assistant}.

    Args:
        sample: a sample that has the columns.
        columns: the columns that `formats.detect` found.
        renamed: the keys of messages that have another name in the sample: {"role": "speaker"}.

    Raises:
        UserError: columns do not match; the text of a list or of a function call is not JSON.
    """
    if columns == QUERIES_AND_ANSWERS:
        return list(_exchanges(sample))
    if len(columns) == 1:
        return normalise_conversation(sample[columns[0]], renamed)
    context, completion = (normalise_conversation(sample[column], renamed) for column in columns)
    if not isinstance(context, list) or not isinstance(completion, list):
        raise UserError(f"columns {' and '.join(map(repr, columns))} must both be lists of messages, or both be text")
    return [message | {"train": False} if isinstance(message, dict) else message for message in context] + completion


def read_history(sample: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the messages of [[query, answer], ...]. Raises UserError for anything else."""
    history = sample.get(HISTORY) or []
    for exchange in history if isinstance(history, list) else [history]:
        if not (isinstance(exchange, list) and len(exchange) == 2 and all(isinstance(text, str) for text in exchange)):
            raise UserError(f"column {HISTORY!r}: expected [[query, answer], ...], found {clip(repr(exchange))}")
    sides = ("user", "assistant")
    return [{"role": role, "content": text} for exchange in history for role, text in zip(sides, exchange)]


def _exchanges(sample: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the messages of an ERNIEKit sample: src and tgt are a text or a list; label 0: answer not trained."""
    queries, answers = ([value] if isinstance(value, str) else value for value in (sample["src"], sample["tgt"]))
    labels = sample.get("label")
    columns = {"src": queries, "tgt": answers, "label": labels}
    columns = {name: values for name, values in columns.items() if values is not None}
    if wrong := next((name for name, values in columns.items() if not isinstance(values, list)), None):
        raise UserError(f"column {wrong!r} must be a list, found {clip(repr(columns[wrong]))}")
    if {"src", "tgt"} - columns.keys() or len(set(map(len, columns.values()))) > 1:
        counts = ", ".join(f"{len(values)} {name}" for name, values in columns.items())
        raise UserError(f"each src has one tgt, and each tgt one label if there are any; found {counts or 'none'}")
    for i, (query, answer) in enumerate(zip(queries, answers)):
        yield {"role": "user", "content": query}
        yield {"role": "assistant", "content": answer} | ({"train": bool(labels[i])} if labels else {})


def normalise_conversation(raw: Any, renamed: Mapping[str, str] = {}) -> Any:
    """Convert a list of messages, or its JSON text, to the keys and roles of OpenAI; return anything else unchanged.

    `renamed` is as in `messages_in`. Raises UserError for text that is not JSON.
    """
    raw = _from_json(raw, "messages") if isinstance(raw, str) and raw.lstrip().startswith("[") else raw
    if not isinstance(raw, list) or not all(isinstance(message, dict) for message in raw):
        return raw
    messages: list[dict[str, Any]] = []
    for i, message in enumerate(message for one in raw for message in _messages(one, renamed)):
        role = message.get("role")
        if role not in _CALLS:
            messages.append(message)
            continue
        calls = _from_json(message.get("content"), f"message {i} ({role})")
        calls = calls if isinstance(calls, list) else [calls]
        if messages and isinstance(messages[-1].get("tool_calls"), list):  # consecutive calls are one turn
            messages[-1]["tool_calls"] = [*messages[-1]["tool_calls"], *calls]
        else:
            messages.append({"role": "assistant", "content": "", "tool_calls": calls})
    return messages


def _messages(raw: dict[str, Any], renamed: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """Yield one message, or the two messages of an exchange, with the keys and roles of OpenAI."""
    # Arrow gives every message all the fields that any message has, with None for a field that a message lacks.
    message = {key: value for key, value in raw.items() if value is not None}
    names = {theirs: name for name, theirs in {"role": "from", "content": "value", **renamed}.items()}
    # A key that already has OpenAI's name wins over a renamed one.
    names = {theirs: name for theirs, name in names.items() if name not in message}
    message = {names.get(key, key): value for key, value in message.items()}  # {from, value} -> {role, content}
    if "role" in message:
        yield message | {"role": _ROLES.get(str(message["role"]), message["role"])}
        return
    # An object without a role may hold both sides of an exchange, under the names of roles.
    sides = {_ROLES.get(key, key): text for key, text in message.items()}
    if not {"user", "assistant"} <= sides.keys():
        yield message
        return
    yield {"role": "user", "content": sides.pop("user")}
    yield {"role": "assistant", "content": sides.pop("assistant"), **sides}


def _from_json(text: Any, what: str) -> Any:
    try:
        return json.loads(text)
    except (TypeError, ValueError):
        raise UserError(f"{what}: not JSON: {clip(repr(text))}") from None
