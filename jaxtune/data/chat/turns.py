"""Find the messages of a conversation in the text that its chat template rendered.

A chat template is a program: it may trim, reorder or drop messages, and does not report their positions. So messages
are rendered with marks (Unicode noncharacters around a message's number) around their contents, and the marks are
searched for in the output. A few renderings find all turns, whatever their number.
"""

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jaxtune.data.chat.encoding import Span, UntrainableSample
from jaxtune.data.chat.messages import ROLES, Message, clip
from jaxtune.data.chat.sandbox import BEFORE_NUMBER, BEHIND_NUMBER, IMAGE
from jaxtune.errors import UserError

Render = Callable[..., str]
"""(messages, tools, **variables of the template) -> the conversation as text."""

_MARK = re.compile(f"{BEFORE_NUMBER}(\\d+)(c?){BEHIND_NUMBER}")  # c: the mark is around the name of a call
_TAG = re.compile(r"<[^<>]*>")
# White space as str.strip() defines it, and the mark of an image.
_OUTSIDE = "".join(chr(code) for code in range(0x3001) if chr(code).isspace()) + IMAGE
# Roles to mark, tried in this order. A template may inspect the text of some roles, and write something else because of
# a mark. Then the marked rendering without its marks differs from the plain one, and fewer roles are marked.
_MARKED_ROLES = (ROLES, ("user", "assistant", "tool"), ("assistant",), ())
# Text that looks like a special token at the end of a text: <|im_end|>, <end_of_turn>, DeepSeek's full-width bars, ...
_TOKEN = re.compile(r"(<\|[^|<>\s]+\|?>|<[^|<>\s]+\|>|<\uff5c[^\uff5c<>\s]+\uff5c>|<[a-z]+(_[a-z]+)+>|</s>|<eos>)\s*\Z")


class Conversation:
    """A rendered conversation, with the places of its messages.

    Attributes:
        text: the rendered conversation. If the template writes no token that ends the last turn, one is appended.
        unwritten: the token that ends turns, if the template writes it only as the beginning of the next message.
        places: (start, end) of each message that was found, by message number: the text between the marks around the
            content, or around the name of the first called tool if the content is empty.
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
        """Render the conversation with marks, and read the places of the messages from it.

        Args:
            render: renders messages and tools to text.
            special: matches the special tokens, `eos` among them.
            eos: the tokenizer's end-of-sequence token, if it has one.
            vocabulary: returns the tokenizer's vocabulary.
            messages: the conversation.
            tools: the tools of the conversation.
            text: the conversation without marks, as `render` writes it.
        """
        self._render, self._special, self._eos, self._vocabulary = render, special, eos, vocabulary
        self._messages, self._tools, self.text = messages, tools, text
        self.unwritten: str | None = None
        for roles in _MARKED_ROLES:
            self._marked = [_mark_message(m, i) if m["role"] in roles else m for i, m in enumerate(messages)]
            plain, self._contents, calls = _split(render(self._marked, tools)) if roles else (text, {}, {})
            if plain == text:
                break
        # Messages that are located by their first call: they have no content, or the template writes calls before it.
        self._by_call = {i for i in calls if i not in self._contents or calls[i] < self._contents[i]}
        self.places = self._contents | {i: calls[i] for i in self._by_call}
        # Caches by kind of message (`_kind`), so that a long conversation takes a few renderings, not several a turn.
        self._tails: dict[Any, str] = {}
        self._thoughtless: dict[Any, str] = {}
        self._headers: dict[Any, str | None] = {}
        self._stops: dict[Any, str] = {}

    def turns(self, turns: Sequence[int]) -> list[Span]:
        """Return the span of each assistant's turn, with the special token that ends it.

        A turn starts where the prompt made of the messages before it ends. To find the stop token, the conversation is
        also rendered cut after the turn: the stop token is the last special token in the text after the turn that both
        renderings share. A token that ends the whole conversation is not shared, nor is the header of the next message.

        Args:
            turns: numbers of the assistant's messages.

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
        """Return the text without marks, and the places of messages in it, located as `places` are."""
        plain, contents, calls = _split(text)
        return plain, calls | contents | {i: calls[i] for i in self._by_call & calls.keys()}

    def _before(self, i: int) -> int | None:
        """Return the number of the last message before i that was found."""
        return next((j for j in range(i - 1, -1, -1) if j in self.places), None)

    def _kind(self, i: int) -> tuple:
        """Return a cache key: prompts of the same kind have the same text after the last message found before i."""
        before = self._before(i)
        kind = []
        for j, message in enumerate(self._messages[before or 0 : i], start=before or 0):
            unmarked = message["content"][_inner(message["content"])[1] if j == before else 0 :]
            kind.append((message["role"], unmarked, str(message.get("tool_calls"))))
        return tuple(kind)

    def _start(self, i: int, position: int, last: bool) -> int:
        """Return the position where the assistant's turn i starts, at `position` or later."""
        before = self._before(i)
        after = self.places[before][1] if before is not None else 0
        kind = self._kind(i)
        if last or kind not in self._tails:
            self._tails[kind] = self._tail(i, kind, last)
        limit = self.places[i][0] if i in self.places else len(self.text)
        for header in self._headers_of(i, kind):
            if self.text.startswith(header, after) and position <= after + len(header) <= limit:
                return after + len(header)
        what, then = (
            ("the prompt", "the answer follows") if last else ("the prompt or the turn", "more messages follow")
        )
        raise UntrainableSample(
            f"message {i} (assistant) cannot be found in the rendered text: the template writes {what} differently "
            f"once {then}. Use a template with {{% generation %}} marks"
        )

    def _headers_of(self, i: int, kind: tuple) -> Iterator[str]:
        """Yield texts that may come between the last message found before turn i and the text of the turn itself.

        The first candidate is the end of the prompt. The prompts of some templates begin a thought, or hold an empty
        one, and the rendered conversation does not. So the second candidate is the text that the template writes before
        an answer that is followed by other messages, if the prompt begins with it too, or if it ends with the prompt
        (the prompt before any message lacks what the first message brings: Llama 3's begin of text, Qwen2.5-VL's
        system message); the third is the end of the prompt with thinking turned off; the last is what the first two
        have in common, if both go on with another special token (North Mini's, for a thought and for an answer).
        """
        tail = self._tails[kind]
        yield tail
        header = self._header(i, kind)
        if header is not None and (tail.startswith(header) or header.endswith(tail)):
            yield header
        if kind not in self._thoughtless:
            self._thoughtless[kind] = self._tail(i, kind, enable_thinking=False, thinking=False)
        yield self._thoughtless[kind]
        if header is not None:
            ends = [token.end() for token in self._special.finditer(tail)]
            shared = max((end for end in ends if header.startswith(tail[:end])), default=0)
            if shared and self._special.match(tail, shared) and self._special.match(header, shared):
                yield tail[:shared]

    def _tail(self, i: int, kind: tuple, last: bool = False, **how: Any) -> str:
        """Return the text of turn i's prompt after the last message found before i."""
        try:
            prompt, places = self._split(self._render(self._marked[:i], self._tools, add_generation_prompt=True, **how))
        except UserError as error:
            if self._has_question(i):
                raise
            return self._tail_without_question(i, kind, error, how)
        if last and (lost := places.keys() - self.places.keys()):
            raise UntrainableSample(
                f"message {i} (assistant) cannot be found after its prompt: once the answer follows, the template "
                f"leaves out message {min(lost)} ({self._messages[min(lost)]['role']}), which the prompt has. Use "
                "another chat.template"
            )
        before = self._before(i)
        return prompt[places[before][1] if before in places else 0 :]

    def _has_question(self, i: int) -> bool:
        """Whether a message of the user comes before message i. Some templates fail without one."""
        return any(message["role"] == "user" for message in self._messages[:i])

    def _tail_without_question(self, i: int, kind: tuple, error: UserError, how: dict[str, Any]) -> str:
        """Return the tail of a prompt that the template refuses to render, because it holds no question.

        The tail is put together from two renderings: the text before an answer in the conversation, up to the answer's
        header, and the header with which a prompt that has a question ends.
        """
        before, with_question = self._header(i, kind), [*self._marked[:i], _USER]
        prompt = self._render(with_question, self._tools, add_generation_prompt=True, **how)
        header = prompt.removeprefix(self._render(with_question, self._tools))
        if before and header and header != prompt:
            if (start := before.rfind(header)) >= 0:
                return before[:start] + header
            # The prompt also begins a thought. Then the longest beginning of `header` in which `before` ends is the
            # header, if it holds at least the special token that begins it.
            token = self._special.match(header)
            for length in range(len(header), token.end() if token else len(header), -1):
                if before.endswith(header[:length]):
                    return before[:-length] + header
        if not how:  # the prompt begins a thought, and the answer has an empty one (Nemotron 3)
            return self._tail_without_question(i, kind, error, {"enable_thinking": False, "thinking": False})
        raise UntrainableSample(
            f"message {i} (assistant) cannot be found in the rendered text: no message of the user is before it, and "
            f"{error}. Use a template with {{% generation %}} marks"
        )

    def _header(self, i: int, kind: tuple) -> str | None:
        """Return the text that the template writes before an answer that other messages follow; None if not found."""
        if kind not in self._headers:
            followed = [*self._marked[:i], _mark_message({"role": "assistant", "content": "a"}, i), _USER]
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
        """Return the position after the stop token of turn i, which starts at `start`."""
        inside = max(start, self.places[i][1]) if i in self.places else start
        later = (self.places[j][0] for j in range(i + 1, len(self._messages)) if j in self.places)
        limit = next(later, sys.maxsize)
        message = self._messages[i]
        if i in self._contents and self._contents[i][0] > limit:
            raise UntrainableSample(
                f"message {i} (assistant): the chat template writes its text behind the next message; leave out the "
                "text next to tool calls, or take another chat.template"
            )
        stop = self._stop(i, inside, limit)
        if stop in message["content"] or stop in str(message.get("tool_calls", "")):
            raise UntrainableSample(f"message {i} (assistant) holds the stop token {stop} in its text")
        position = self.text.find(stop, inside, limit)
        if position < 0:
            raise UntrainableSample(f"message {i} (assistant) has no stop token {stop} before the next message")
        return position + len(stop)

    def _stop(self, i: int, inside: int, limit: int) -> str:
        """Return the token that ends turn i, whose text ends at `inside`, in the whole conversation."""
        calls = bool(self._messages[i].get("tool_calls"))
        if i == len(self._messages) - 1:
            return self._last_stop(i, inside, calls)
        kind = (calls, self._messages[i + 1]["role"])
        if kind not in self._stops:
            cut, places = self._split(self._up_to(i))
            ending = cut[places[i][1] if i in places else inside :]
            stop = self._in_common(i, ending, self.text[inside:limit])
            # A template may end the last turn in another token than earlier turns. Then the token after this turn is
            # its stop token if it also follows messages before the turn.
            if stop is None and not calls and self._special.search(ending):
                token = self._special.search(self.text, inside, limit)
                if token is None or token.group() not in self._special.findall(self._end_of_others(i)):
                    raise UntrainableSample(
                        f"message {i} (assistant): {clip(self.text[inside:limit])!r} follows it, but {clip(ending)!r} "
                        "if the conversation ends with it, so it is unclear which token ends the turn. Use a template "
                        "with {% generation %} marks"
                    )
                stop = token.group()
            if stop is None and self._messages[i + 1]["role"] in ("user", "tool"):
                stop = self._next_token_as_stop(ending, self.text[inside:limit])
            if stop is None:
                raise self._no_stop(i, ending)
            self._stops[kind] = stop
        return self._stops[kind]

    def _last_stop(self, i: int, inside: int, calls: bool) -> str:
        """Return the token that ends the last message; tokens that end the whole conversation may follow it.

        A message is appended, so that the two renderings differ after the end of the turn.
        """
        ending = self.text[inside:]
        try:
            longer, places = self._split(
                self._render([*self._marked, _result(self._messages[i]) if calls else _USER], self._tools)
            )
        except UserError:  # the template allows no message after it
            longer, places = self.text, self.places
        followed = longer[places[i][1] if i in places else inside :]
        stop = self._in_common(i, ending, followed)
        if stop is None:
            ends = [token.group() for token in self._special.finditer(ending) if not ending[token.end() :].strip()]
            stop = ends[-1] if ends else None
        if stop is None and (stop := self._next_token_as_stop(ending, followed)):
            self.text += stop
        if stop is None:
            raise self._no_stop(i, ending)
        return stop

    def _next_token_as_stop(self, ending: str, followed: str) -> str | None:
        """Return the special token that begins the next message, if the template writes none that ends a turn (GLM).

        Args:
            ending: the text after the turn, in a conversation that ends with the turn.
            followed: the text after the turn, if another message follows.
        """
        if not followed.startswith(ending) or self._special.search(ending) or missing_token(ending, self._vocabulary()):
            return None
        token = self._special.match(followed, len(ending))
        self.unwritten = token.group() if token else None
        return self.unwritten

    def _in_common(self, i: int, text: str, other: str) -> str | None:
        """Return the last special token in the common beginning of two texts that follow turn i.

        A template that always writes the header of the next answer (Command R7B's) may end in a token of that header;
        then the tokenizer's eos ends the turn. One that writes no header after a call (Gemma 4's, whose answer goes on
        behind the tool's result) ends in the turn's own token.
        """
        shared = next((i for i, (a, b) in enumerate(zip(text, other)) if a != b), min(len(text), len(other)))
        tokens = [token.group() for token in self._special.finditer(text) if token.end() <= shared]
        always_prompts = len(tokens) > 1 and self._up_to(i) == self._up_to(i, add_generation_prompt=True)
        if always_prompts and self._ends_in_header(i, text):
            if self._eos not in tokens:
                raise UntrainableSample(
                    f"message {i} (assistant): the chat template writes the next answer's header whatever "
                    f"add_generation_prompt says, so it is unclear which of {', '.join(tokens)} ends the turn. Use "
                    "a template with {% generation %} marks"
                )
            return self._eos
        return tokens[-1] if tokens else None

    def _ends_in_header(self, i: int, text: str) -> bool:
        """Whether a text ends as the prompt of turn i does, from the prompt's last special token on."""
        prompt = self._tails[self._kind(i)]
        tokens = [token.start() for token in self._special.finditer(prompt)]
        return bool(tokens) and text.endswith(prompt[tokens[-1] :])

    def _up_to(self, i: int, **how: Any) -> str:
        """Render the conversation up to turn i, with a question before it if the template fails without one."""
        try:
            return self._render(self._marked[: i + 1], self._tools, **how)
        except UserError:
            if self._has_question(i):
                raise
            return self._render([*self._marked[:i], _USER, self._marked[i]], self._tools, **how)

    def _end_of_others(self, i: int) -> str:
        """Return the text after the last message found before i, in a conversation that ends before i.

        If no question comes before i, one is appended, and the text after the question is returned.
        """
        earlier, last = self._marked[:i], self._before(i)
        if not self._has_question(i):
            earlier, last = [*earlier, _mark_message(_USER, i)], i
        text, places = self._split(self._render(earlier, self._tools))
        return text[places[last][1] :] if last in places else ""

    def _no_stop(self, i: int, ending: str) -> UserError:
        """Return the error that turn i, which is followed by `ending`, has no stop token."""
        missing = missing_token(ending, self._vocabulary())
        if missing and not self._messages[i]["content"].rstrip().endswith(missing):
            return missing_token_error(missing)
        return UntrainableSample(
            f"message {i} (assistant) renders without a stop token at its end: {clip(ending)!r}; "
            "take another chat.template, such as the family's in jaxtune"
        )

    def content(self, i: int) -> Span | None:
        """Return the span of message i's content without white space around it; None if the template changed it."""
        if i not in self.places:
            return None
        content = self._messages[i]["content"]
        start, end = _inner(content)
        first, last = self.places[i]
        if IMAGE in content:  # the template writes text of its own for each image
            pieces = map(re.escape, content[start:end].split(IMAGE))
            return (first, last) if re.fullmatch("(?s:.*?)".join(pieces), self.text[first:last]) else None
        # The marks are inside thoughts and tags around the text (`_inner`): widen the span to the whole content.
        place = first - len(content[:start].lstrip()), last + len(content[end:].rstrip())
        return place if self.text[slice(*place)] == content.strip() else None


def missing_token(text: str, vocabulary: dict[str, int]) -> str | None:
    """Return the end of a text, if it looks like a special token and is not in the vocabulary."""
    token = _TOKEN.search(text)
    return token[1] if token and token[1] not in vocabulary else None


def missing_token_error(token: str) -> UserError:
    """Return the error that a template ends turns in a token that the tokenizer does not have."""
    return UserError(
        f"the chat template ends a turn in {token}, which this tokenizer does not have; take the tokenizer that "
        f"belongs to the template, another chat.template, or --config.data.special_tokens='{token}', which adds it"
    )


_USER: Message = {"role": "user", "content": "a"}


def _result(message: Message) -> Message:
    """Make up a result of a message's first call."""
    call = message["tool_calls"][0]
    name = call.get("function", call)["name"]
    return {"role": "tool", "content": "a", "name": name, "tool_call_id": call.get("id", "a")}


def _mark_message(message: Message, i: int) -> Message:
    """Return the message with marks around its content and the names of its calls."""
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
    """Return the span to mark: without white space, thoughts and tags around it, which templates look for and cut.

    Images at the ends are outside too, so that a text with marks has the same parts as one without.
    """
    whole = len(content) - len(content.lstrip(_OUTSIDE)), len(content.rstrip(_OUTSIDE))
    thought = content.rfind("</think>") + len("</think>")
    start = thought if thought >= len("</think>") else 0
    start = len(content) - len(content[start:].lstrip(_OUTSIDE))
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
    """Return the text without marks, and the spans of contents and of calls, by message number.

    A span is between the first two marks of a message, and empty if the template dropped one mark.
    """
    parts, end, position = [], 0, 0
    marks: dict[str, dict[int, list[int]]] = {"": {}, "c": {}}
    for mark in _MARK.finditer(text):
        parts.append(text[end : mark.start()])
        position += mark.start() - end
        end = mark.end()
        marks[mark[2]].setdefault(int(mark[1]), []).append(position)
    contents, calls = ({i: (ends[0], ends[min(1, len(ends) - 1)]) for i, ends in marks[kind].items()} for kind in marks)
    return "".join([*parts, text[end:]]), contents, calls
