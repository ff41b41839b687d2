"""Compute the weights of the characters of a conversation from the options of the section chat."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from jaxtune.data.chat.encoding import Span
from jaxtune.data.chat.messages import ROLES, Message
from jaxtune.data_options import MESSAGE_SELECTIONS, ChatOptions

Patterns = tuple[tuple[str, float], ...]
"""(regular expression, factor of the weight of matching text)."""


def _sections(weights: dict[str, tuple[float, float]]) -> Patterns:
    """Return patterns for keywords, and for the text after each one up to the next keyword or the end.

    `weights`: (factor of the keyword, factor of the text after it), by keyword.
    """
    # Lookarounds leave the keywords out of the text between them: each keyword has a factor of its own.
    end = rf"(?={'|'.join(weights)}|\Z)"
    return tuple(
        pattern
        for keyword, (itself, after) in weights.items()
        for pattern in ((keyword, itself), (f"(?s)(?<={keyword}).*?{end}", after))
    )


# The weights of ms-swift.
_PATTERNS: dict[str, Patterns] = {
    "ignore_empty_think": ((r"<think>\s*</think>\s*", 0.0),),
    "ignore_think_prefix": ((r"\A<think>\n", 0.0),),
    "hermes": ((r"(?s)<tool_call>.+?</tool_call>", 2.0),),
    "react": _sections(
        {
            "Action:": (2.0, 2.0),
            "Action Input:": (2.0, 2.0),
            "Thought:": (1.0, 1.0),
            "Final Answer:": (1.0, 1.0),
            "Observation:": (2.0, 0.0),  # what follows is the tool's text
        }
    ),
    "qwen": _sections(
        {"✿FUNCTION✿:": (2.0, 2.0), "✿ARGS✿:": (2.0, 2.0), "✿RETURN✿:": (1.0, 1.0), "✿RESULT✿:": (2.0, 0.0)}
    ),
}


@dataclass(frozen=True)
class TrainedMessage:
    """A trained message in the rendered text.

    Attributes:
        start: start of the message's text.
        stop: end of the text, and start of the token that ends the message.
        end: end of this token.
        weight: the message's own weight, which replaces the weights of patterns; None: it has none.
    """

    start: int
    stop: int
    end: int
    weight: float | None = None


def trains_everything(chat: ChatOptions) -> bool:
    """Whether all text is trained, of every role and between messages."""
    return chat.loss_scale.split("+")[0] == "all"


def trained_messages(messages: Sequence[Message], chat: ChatOptions) -> list[int]:
    """Return the numbers of the messages that are trained."""
    base = chat.loss_scale.split("+")[0]
    users = [i for i, message in enumerate(messages) if message["role"] == "user"]
    first = users[-1] if base == "last_round" and users else 0  # after the last question
    roles = ROLES if trains_everything(chat) else chat.roles
    return [i for i, m in enumerate(messages) if m.get("train", i >= first and m["role"] in roles)]


def weighted_spans(
    text: str, parts: Sequence[TrainedMessage], others: Iterable[Span], chat: ChatOptions
) -> Iterator[tuple[Span, float]]:
    """Yield the trained spans of a text with their weights, in order.

    Args:
        text: the rendered conversation.
        parts: the messages that are trained.
        others: the messages that are not trained although all other text is (chat.loss_scale='all').
        chat: the options.
    """
    base, *names = chat.loss_scale.split("+")
    names = names if base in MESSAGE_SELECTIONS else [base, *names]
    patterns = [pattern for name in names for pattern in _PATTERNS[name]]
    patterns += [
        (regex, float(factor)) for regex, _, factor in (entry.rpartition("=") for entry in chat.pattern_weights)
    ]
    # One weight for each character; later steps overwrite earlier ones, and patterns multiply.
    weights = np.full(len(text), trains_everything(chat), np.float32)
    for start, end in others:
        weights[start:end] = 0
    if chat.train_on_eos == "all":
        for stop in {text[part.stop : part.end].rstrip() for part in parts if part.end > part.stop}:
            # Every occurrence, also after messages that are not trained.
            for match in re.finditer(re.escape(stop), text):
                weights[slice(*match.span())] = 1
    last = chat.train_on_eos == "last"
    for part in parts:
        weights[part.start : part.stop] = 1 if part.weight is None else part.weight
        if trains_everything(chat) or chat.train_on_eos in ("turn", "all") or (last and part is parts[-1]):
            weights[part.stop : part.end] = 1 if part.weight is None else part.weight
        for regex, factor in patterns if part.weight is None else ():
            # Only the message is searched, so \A in a pattern is the beginning of the message.
            for match in re.finditer(regex, text[part.start : part.stop]):
                weights[part.start + match.start() : part.start + match.end()] *= factor
    # Yield runs of characters with the same weight.
    edges = [0, *np.flatnonzero(np.diff(weights)) + 1, len(text)]  # where the weight changes
    for start, end in pairwise(edges):
        if end > start and weights[start]:
            yield (int(start), int(end)), float(weights[start])
