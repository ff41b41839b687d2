"""Which characters of a conversation are trained, and with which weight: the options of the section chat."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from jaxtune.config.schema import TRAINED, Chat
from jaxtune.data.chat.encoding import Span
from jaxtune.data.chat.messages import ROLES, Message

Patterns = tuple[tuple[str, float], ...]
"""(regular expression, factor of the weight of what matches)."""


def _sections(weights: dict[str, tuple[float, float]]) -> Patterns:
    """Patterns of keywords, and of what follows each until the next one, or until the end."""
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
            "Observation:": (2.0, 0.0),
        }
    ),
    "qwen": _sections(
        {"✿FUNCTION✿:": (2.0, 2.0), "✿ARGS✿:": (2.0, 2.0), "✿RETURN✿:": (1.0, 1.0), "✿RESULT✿:": (2.0, 0.0)}
    ),
}


@dataclass(frozen=True)
class Part:
    """A trained message in the rendered text.

    Attributes:
        start, stop, end: its text is [start, stop), the token that ends it [stop, end).
        weight: its own, instead of those by patterns.
    """

    start: int
    stop: int
    end: int
    weight: float | None = None


def everything(chat: Chat) -> bool:
    """Whether all text is trained, whoever wrote it."""
    return chat.loss_scale.split("+")[0] == "all"


def trained(messages: Sequence[Message], chat: Chat) -> list[int]:
    """The numbers of the messages that are trained."""
    base = chat.loss_scale.split("+")[0]
    users = [i for i, message in enumerate(messages) if message["role"] == "user"]
    first = users[-1] if base == "last_round" and users else 0
    roles = ROLES if everything(chat) else chat.roles
    return [i for i, m in enumerate(messages) if m.get("train", i >= first and m["role"] in roles)]


def weigh(text: str, parts: Sequence[Part], others: Iterable[Span], chat: Chat) -> Iterator[tuple[Span, float]]:
    """The parts of a text that are trained, with their weights, in order.

    Args:
        text: The rendered conversation.
        parts: The messages that are trained.
        others: Messages that are not, where everything else is (chat.loss_scale='all').
        chat: The options.
    """
    base, *names = chat.loss_scale.split("+")
    names = names if base in TRAINED else [base, *names]
    patterns = [pattern for name in names for pattern in _PATTERNS[name]]
    patterns += [
        (regex, float(factor)) for regex, _, factor in (entry.rpartition("=") for entry in chat.pattern_weights)
    ]
    weights = np.full(len(text), everything(chat), np.float32)
    for start, end in others:
        weights[start:end] = 0
    if chat.train_on_eos == "all":
        for stop in {text[part.stop : part.end].rstrip() for part in parts if part.end > part.stop}:
            for found in re.finditer(re.escape(stop), text):
                weights[slice(*found.span())] = 1
    last = chat.train_on_eos == "last"
    for part in parts:
        weights[part.start : part.stop] = 1 if part.weight is None else part.weight
        if everything(chat) or chat.train_on_eos in ("turn", "all") or (last and part is parts[-1]):
            weights[part.stop : part.end] = 1 if part.weight is None else part.weight
        for regex, factor in patterns if part.weight is None else ():
            for found in re.finditer(regex, text[part.start : part.stop]):
                weights[part.start + found.start() : part.start + found.end()] *= factor
    edges = [0, *np.flatnonzero(np.diff(weights)) + 1, len(text)]
    for start, end in pairwise(edges):
        if end > start and weights[start]:
            yield (int(start), int(end)), float(weights[start])
