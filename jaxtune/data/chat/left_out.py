"""Find what a chat template leaves out of a conversation: a lost answer is an error, the rest is reported once."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jaxtune.data.chat.encoding import Span, UntrainableSample
from jaxtune.data.chat.messages import UNSEEN, Message
from jaxtune.errors import UserError

Kind = tuple[str, str]
"""(role, key of its messages or "text next to calls"), or ("", "tools")."""

_NO_ANSWER = ("role", "name", *UNSEEN)


def refuse_empty_answers(messages: list[Message], turns: Sequence[int]) -> None:
    """Raise Refused if an assistant's turn has no text, thought or tool call to train."""
    for i in turns:
        # The rendered text does not tell: some templates write an empty thought for such a message (Qwen3's).
        answer = [value for key, value in messages[i].items() if key not in _NO_ANSWER]
        if not any(value.strip() if isinstance(value, str) else value for value in answer):
            raise UntrainableSample(f"message {i} (assistant) is empty: it has no text, thought or tool call to train")


def refuse_lost_answers(
    messages: list[Message], turns: Sequence[int], spans: Sequence[Span], text: str, stop: Callable[[str], str | None]
) -> None:
    """Raise Refused if an assistant's turn renders as nothing, or without its tool calls.

    Args:
        messages: the conversation.
        turns: numbers of the assistant's messages.
        spans: spans of the turns in `text`. If the template marks turns, the numbers of spans and turns may differ.
        text: the rendered conversation.
        stop: returns the special token that ends a text.
    """
    answers = [text[start:end].strip() for start, end in spans]
    for i, answer in zip(turns, answers):
        if answer == stop(answer):
            raise UntrainableSample(
                f"message {i} (assistant) renders as nothing, so only the token that ends it would be trained"
            )
    written: dict[str, bool] = {}  # whether a call of each function is in some answer
    for i in turns:
        for call in messages[i].get("tool_calls", ()):
            name = call.get("function", call)["name"]
            if name not in written:
                written[name] = any(name in answer for answer in answers)
            if not written[name]:
                raise UntrainableSample(
                    f"message {i} (assistant): the chat template leaves out its tool call; use the tokenizer of a "
                    "model that calls tools, another chat.template, or chat.agent_template"
                )


def find_ignored_content(
    messages: list[Message], tools: list[Any] | None, text: str, render: Callable[..., str], tried: set[Kind]
) -> Iterator[str]:
    """Yield a line for each kind of content that the template ignores: rendering without it gives the same `text`.

    Each kind is tried once, at its first occurrence in the data, and added to `tried`.
    """
    without: dict[Kind, tuple[list[Message], list[Any] | None]] = {("", "tools"): (messages, None)} if tools else {}
    for i, message in enumerate(messages):
        for key in message.keys() - {"role", *UNSEEN}:
            changed = message | {"content": ""} if key == "content" else {k: v for k, v in message.items() if k != key}
            if changed != message:
                kind = "text next to calls" if key == "content" and "tool_calls" in message else key
                without.setdefault((message["role"], kind), ([*messages[:i], changed, *messages[i + 1 :]], tools))
    for kind in sorted(without.keys() - tried):
        tried.add(kind)
        role, key = kind
        try:
            same = render(*without[kind]) == text
        except UserError:  # the template requires it
            same = False
        if same:
            what = {
                "tools": "tools are",
                "content": f"messages of role {role!r} are",
                "text next to calls": f"the text next to tool calls in messages of role {role!r} is",
            }
            yield f"{what.get(key, f'{key!r} in messages of role {role!r} is')} left out by the chat template"
