"""Where messages are in a conversation that a chat template has rendered.

Messages are rendered with marks around their texts. So a few renderings find all turns, whatever their number.
"""

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jaxtune.data.chat.encoding import Refused, Span
from jaxtune.data.chat.messages import ROLES, Message, clip
from jaxtune.data.chat.sandbox import BEFORE_NUMBER, BEHIND_NUMBER
from jaxtune.errors import UserError

Render = Callable[..., str]
"""(messages, tools, **variables of the template) -> the conversation as text."""

_MARK = re.compile(f"{BEFORE_NUMBER}(\\d+)(c?){BEHIND_NUMBER}")  # c: around the name of a call
_TAG = re.compile(r"<[^<>]*>")
# A template may look at the text of some messages, so that a mark there changes what it writes.
_MARKED_ROLES = (ROLES, ("user", "assistant", "tool"), ("assistant",), ())
# Text that looks like a special token.
_TOKEN = re.compile(r"(<\|[^|<>\s]+\|?>|<[^|<>\s]+\|>|<\uff5c[^\uff5c<>\s]+\uff5c>|<[a-z]+(_[a-z]+)+>|</s>|<eos>)\s*\Z")


class Conversation:
    """A conversation as rendered, with the places of its messages.

    Attributes:
        text: the conversation; where the template writes no token that ends its last turn, with that token.
        unwritten: the token that ends turns, if it is only what the next message begins with.
        places: (start, end) of the messages that were found, by their number: what is between the marks around the
            content, or the name of the first called tool if there is no content.
    """

    def __init__(
        self,
        render: Render,
        special: re.Pattern[str],
        eos: str | None,
        vocabulary: Callable[[], dict[str, int]],
        messages: list[Message],
        tools: list[Any] | None,
        text: str,
    ):
        """`text`: the conversation, as `render` writes it; `special`: matches the special tokens, of which `eos` is."""
        self._render, self._special, self._eos, self._vocabulary = render, special, eos, vocabulary
        self._messages, self._tools, self.text = messages, tools, text
        self.unwritten: str | None = None
        for roles in _MARKED_ROLES:
            self._marked = [_marked(m, i) if m["role"] in roles else m for i, m in enumerate(messages)]
            plain, self._contents, calls = _split(render(self._marked, tools)) if roles else (text, {}, {})
            if plain == text:
                break
        self._by_call = {i for i in calls if i not in self._contents or calls[i] < self._contents[i]}
        self.places = self._contents | {i: calls[i] for i in self._by_call}
        self._tails: dict[Any, str] = {}
        self._thoughtless: dict[Any, str] = {}
        self._headers: dict[Any, str | None] = {}
        self._stops: dict[Any, str] = {}

    def turns(self, turns: Sequence[int]) -> list[Span]:
        """The assistant's turns, the messages of these numbers, each with the special token that ends it.

        A turn starts where the prompt made of the messages before it ends. The stop token is the last special token in
        what the conversation and the conversation cut after the turn have in common: a token that ends the whole
        conversation is not in it, nor is the header of the next message.

        Raises:
            Refused: a turn cannot be found, or has no stop token.
            UserError: turns end in a special token that the tokenizer does not have.
        """
        spans, end = [], 0
        for i in turns:
            start = self._start(i, end, last=i == turns[-1])
            end = self._end(i, start)
            spans.append((start, end))
        return spans

    def _split(self, text: str) -> tuple[str, dict[int, Span]]:
        """The text without marks, and the places of messages in it, by what they were found by in the conversation."""
        plain, contents, calls = _split(text)
        return plain, calls | contents | {i: calls[i] for i in self._by_call & calls.keys()}

    def _before(self, i: int) -> int | None:
        """The last message before i that was found."""
        return next((j for j in range(i - 1, -1, -1) if j in self.places), None)

    def _kind(self, i: int) -> tuple:
        """Prompts of one kind are the same from the last message before i that was found."""
        before = self._before(i)
        kind = []
        for j, message in enumerate(self._messages[before or 0 : i], start=before or 0):
            unmarked = message["content"][_inner(message["content"])[1] if j == before else 0 :]
            kind.append((message["role"], unmarked, str(message.get("tool_calls"))))
        return tuple(kind)

    def _start(self, i: int, position: int, last: bool) -> int:
        """Where the assistant's turn i starts, not before `position`."""
        before = self._before(i)
        behind = self.places[before][1] if before is not None else 0
        kind = self._kind(i)
        if last or kind not in self._tails:
            self._tails[kind] = self._tail(i, kind, last)
        limit = self.places[i][0] if i in self.places else len(self.text)
        for header in self._headers_of(i, kind):
            if self.text.startswith(header, behind) and position <= behind + len(header) <= limit:
                return behind + len(header)
        what, then = (
            ("the prompt", "the answer follows") if last else ("the prompt or the turn", "more messages follow")
        )
        raise Refused(
            f"message {i} (assistant) cannot be found in the rendered text: the template writes {what} differently "
            f"once {then}. Use a template with {{% generation %}} marks"
        )

    def _headers_of(self, i: int, kind: tuple) -> Iterator[str]:
        """What may be between the last message before turn i that was found, and what the turn's author wrote.

        First the end of the prompt. Prompts of some templates begin the thought, or have an empty one, and the
        conversation does not: then what the template writes before an answer that others follow, if the prompt has it
        too, or the end of the prompt for an answer without a thought.
        """
        yield self._tails[kind]
        header = self._header(i, kind)
        if header is not None and self._tails[kind].startswith(header):
            yield header
        if kind not in self._thoughtless:
            self._thoughtless[kind] = self._tail(i, kind, enable_thinking=False, thinking=False)
        yield self._thoughtless[kind]

    def _tail(self, i: int, kind: tuple, last: bool = False, **how: Any) -> str:
        """What the prompt of turn i has after the last message before i that was found."""
        try:
            prompt, places = self._split(self._render(self._marked[:i], self._tools, add_generation_prompt=True, **how))
        except UserError as error:
            if self._is_asked(i):
                raise
            return self._tail_without_question(i, kind, error, how)
        if last and (lost := places.keys() - self.places.keys()):
            raise Refused(
                f"message {i} (assistant) cannot be found after its prompt: once the answer follows, the template "
                f"leaves out message {min(lost)} ({self._messages[min(lost)]['role']}), which the prompt has. Use "
                "another chat.template"
            )
        before = self._before(i)
        return prompt[places[before][1] if before in places else 0 :]

    def _is_asked(self, i: int) -> bool:
        """Whether a message of the user is before message i. Some templates fail without one."""
        return any(message["role"] == "user" for message in self._messages[:i])

    def _tail_without_question(self, i: int, kind: tuple, error: UserError, how: dict[str, Any]) -> str:
        """The tail of a prompt that the template does not write, because it holds no question.

        What is before an answer there, up to the answer's header, and that which the prompt of a question ends in.
        """
        before, asked = self._header(i, kind), [*self._marked[:i], _USER]
        prompt = self._render(asked, self._tools, add_generation_prompt=True, **how)
        header = prompt.removeprefix(self._render(asked, self._tools))
        if before and header and header != prompt:
            if (start := before.rfind(header)) >= 0:
                return before[:start] + header
            # The prompt also begins a thought: what they share begins with a special token.
            token = self._special.match(header)
            for length in range(len(header), token.end() if token else len(header), -1):
                if before.endswith(header[:length]):
                    return before[:-length] + header
        raise Refused(
            f"message {i} (assistant) cannot be found in the rendered text: no message of the user is before it, and "
            f"{error}. Use a template with {{% generation %}} marks"
        )

    def _header(self, i: int, kind: tuple) -> str | None:
        """What the template writes before an answer that others follow."""
        if kind not in self._headers:
            followed = [*self._marked[:i], _marked({"role": "assistant", "content": "a"}, i), _USER]
            try:
                text, places = self._split(self._render(followed, self._tools))
            except UserError:
                text, places = "", {}
            before = self._before(i)
            known = i in places and (before is None or before in places)
            start = places[before][1] if before in places else 0
            self._headers[kind] = text[start : places[i][0]] if known else None
        return self._headers[kind]

    def _end(self, i: int, start: int) -> int:
        """Where turn i, which starts at `start`, ends: after its stop token."""
        inside = max(start, self.places[i][1]) if i in self.places else start
        later = (self.places[j][0] for j in range(i + 1, len(self._messages)) if j in self.places)
        limit = next(later, sys.maxsize)
        message = self._messages[i]
        if i in self._contents and self._contents[i][0] > limit:
            raise Refused(
                f"message {i} (assistant): the chat template writes its text behind the next message; leave out the "
                "text next to tool calls, or take another chat.template"
            )
        stop = self._stop(i, inside, limit)
        if stop in message["content"] or stop in str(message.get("tool_calls", "")):
            raise Refused(f"message {i} (assistant) holds the stop token {stop} in its text")
        found = self.text.find(stop, inside, limit)
        if found < 0:
            raise Refused(f"message {i} (assistant) has no stop token {stop} before the next message")
        return found + len(stop)

    def _stop(self, i: int, inside: int, limit: int) -> str:
        """The token that ends turn i, whose text ends at `inside`, in the whole conversation."""
        calls = bool(self._messages[i].get("tool_calls"))
        if i == len(self._messages) - 1:
            return self._last_stop(i, inside, calls)
        kind = (calls, self._messages[i + 1]["role"])
        if kind not in self._stops:
            cut, places = self._split(self._up_to(i))
            alone = cut[places[i][1] if i in places else inside :]
            stop = self._in_common(i, alone, self.text[inside:limit])
            # A template may end the conversation in another token instead: then other messages end in that of the turn.
            if stop is None and not calls and self._special.search(alone):
                found = self._special.search(self.text, inside, limit)
                if found is None or found.group() not in self._special.findall(self._end_of_others(i)):
                    raise Refused(
                        f"message {i} (assistant): {clip(self.text[inside:limit])!r} follows it, but {clip(alone)!r} "
                        "where the conversation ends with it, so it is unclear which token ends the turn. Use a "
                        "template with {% generation %} marks"
                    )
                stop = found.group()
            if stop is None and self._messages[i + 1]["role"] in ("user", "tool"):
                stop = self._unwritten(alone, self.text[inside:limit])
            if stop is None:
                raise self._no_stop(i, alone)
            self._stops[kind] = stop
        return self._stops[kind]

    def _last_stop(self, i: int, inside: int, calls: bool) -> str:
        """The token that ends the last message, of which others may follow that end the conversation."""
        alone = self.text[inside:]
        try:
            more, places = self._split(
                self._render([*self._marked, _result(self._messages[i]) if calls else _USER], self._tools)
            )
        except UserError:  # the template allows nothing after it
            more, places = self.text, self.places
        followed = more[places[i][1] if i in places else inside :]
        stop = self._in_common(i, alone, followed)
        if stop is None:
            ends = [found.group() for found in self._special.finditer(alone) if not alone[found.end() :].strip()]
            stop = ends[-1] if ends else None
        if stop is None and (stop := self._unwritten(alone, followed)):
            self.text += stop
        if stop is None:
            raise self._no_stop(i, alone)
        return stop

    def _unwritten(self, alone: str, followed: str) -> str | None:
        """The special token with which the next message begins, if a turn ends with nothing before it, as GLM's.

        `alone`: the end of the turn, without another message; `followed`: with one.
        """
        if not followed.startswith(alone) or self._special.search(alone) or missing_token(alone, self._vocabulary()):
            return None
        found = self._special.match(followed, len(alone))
        self.unwritten = found.group() if found else None
        return self.unwritten

    def _in_common(self, i: int, text: str, other: str) -> str | None:
        """The last special token of what both texts, which follow turn i, begin with.

        A template that always writes the prompt of an answer (Command R7B's) may end in a token of that header; then
        the tokenizer's eos ends the turn.
        """
        shared = next((i for i, (a, b) in enumerate(zip(text, other)) if a != b), min(len(text), len(other)))
        found = [found.group() for found in self._special.finditer(text) if found.end() <= shared]
        if len(found) > 1 and self._up_to(i) == self._up_to(i, add_generation_prompt=True):
            if self._eos not in found:
                raise Refused(
                    f"message {i} (assistant): the chat template writes the next answer's header whatever "
                    f"add_generation_prompt says, so it is unclear which of {', '.join(found)} ends the turn. Use "
                    "a template with {% generation %} marks"
                )
            return self._eos
        return found[-1] if found else None

    def _up_to(self, i: int, **how: Any) -> str:
        """The conversation cut after turn i. A question is before the turn if the template fails without one."""
        try:
            return self._render(self._marked[: i + 1], self._tools, **how)
        except UserError:
            if self._is_asked(i):
                raise
            return self._render([*self._marked[:i], _USER, self._marked[i]], self._tools, **how)

    def _end_of_others(self, i: int) -> str:
        """What follows the text of the last message before i; of a question if there is none before it."""
        others, last = self._marked[:i], self._before(i)
        if not self._is_asked(i):
            others, last = [*others, _marked(_USER, i)], i
        text, places = self._split(self._render(others, self._tools))
        return text[places[last][1] :] if last in places else ""

    def _no_stop(self, i: int, alone: str) -> UserError:
        missing = missing_token(alone, self._vocabulary())
        if missing and not self._messages[i]["content"].rstrip().endswith(missing):
            return lacks(missing)
        return Refused(
            f"message {i} (assistant) renders without a stop token at its end: {clip(alone)!r}; "
            "take another chat.template, such as the family's in jaxtune"
        )

    def content(self, i: int) -> Span | None:
        """Where the content of message i is, white space aside, if it is there as it is."""
        if i not in self.places:
            return None
        content = self._messages[i]["content"]
        start, end = _inner(content)
        first, last = self.places[i]
        place = first - len(content[:start].lstrip()), last + len(content[end:].rstrip())
        return place if self.text[slice(*place)] == content.strip() else None


def missing_token(text: str, vocabulary: dict[str, int]) -> str | None:
    """What a text ends in, if that looks like a special token and the vocabulary does not have it."""
    found = _TOKEN.search(text)
    return found[1] if found and found[1] not in vocabulary else None


def lacks(token: str) -> UserError:
    """The error that a template ends turns in a token that the tokenizer does not have."""
    return UserError(
        f"the chat template ends a turn in {token}, which this tokenizer does not have; take the tokenizer that "
        f"belongs to the template, another chat.template, or --config.data.special_tokens='{token}', which adds it"
    )


_USER: Message = {"role": "user", "content": "a"}


def _result(message: Message) -> Message:
    """A result of a message's first call."""
    call = message["tool_calls"][0]
    name = call.get("function", call)["name"]
    return {"role": "tool", "content": "a", "name": name, "tool_call_id": call.get("id", "a")}


def _marked(message: Message, i: int) -> Message:
    """The message with marks around its content and the names of its calls."""
    mark, content = f"{BEFORE_NUMBER}{i}{BEHIND_NUMBER}", message["content"]
    call_mark = f"{BEFORE_NUMBER}{i}c{BEHIND_NUMBER}"
    marked = dict(message)
    start, end = _inner(content)
    if start < end:
        marked["content"] = f"{content[:start]}{mark}{content[start:end]}{mark}{content[end:]}"
    if "tool_calls" in message:
        marked["tool_calls"] = [_with_name(call, call_mark) for call in message["tool_calls"]]
    return marked


def _inner(content: str) -> Span:
    """The part to mark: without white space, thoughts and tags around it, which templates look for and cut off."""
    whole = len(content) - len(content.lstrip()), len(content.rstrip())
    thought = content.rfind("</think>") + len("</think>")
    start = thought if thought >= len("</think>") else 0
    start = len(content) - len(content[start:].lstrip())
    if tag := _TAG.match(content, start):
        start = tag.end()
    end = whole[1]
    if content.endswith(">", 0, end) and _TAG.fullmatch(content, tag := content.rfind("<", start, end), end):
        end = tag
    return (start, end) if content[start:end].strip() else whole


def _with_name(call: Any, mark: str) -> Any:
    if "function" in call:
        return call | {"function": _with_name(call["function"], mark)}
    return call | {"name": f"{mark}{call['name']}{mark}"}


def _split(text: str) -> tuple[str, dict[int, Span], dict[int, Span]]:
    """The text without marks, and each message's span between its first two marks: of its content, of its calls."""
    parts, end, position = [], 0, 0
    marks: dict[str, dict[int, list[int]]] = {"": {}, "c": {}}
    for found in _MARK.finditer(text):
        parts.append(text[end : found.start()])
        position += found.start() - end
        end = found.end()
        marks[found[2]].setdefault(int(found[1]), []).append(position)
    contents, calls = ({i: (first[0], first[min(1, len(first) - 1)]) for i, first in marks[of].items()} for of in marks)
    return "".join([*parts, text[end:]]), contents, calls
