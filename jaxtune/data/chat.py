"""Conversations: the chat template renders them; the assistant's turns are trained, with the token that ends each."""

from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from jaxtune.config.schema import Chat
from jaxtune.data import masks
from jaxtune.data.agents import as_text
from jaxtune.data.encoding import Encoder, Refused, Rendered, Span
from jaxtune.data.left_out import Kind, left_out, refuse_lost_answers
from jaxtune.data.messages import UNSEEN, Message, clip, with_text_arguments
from jaxtune.data.sandbox import CLOSE, OPEN, Template
from jaxtune.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class ChatTemplate:
    """A tokenizer's chat template."""

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerFast",
        say: Callable[[str], object] = lambda line: None,
        chat: Chat = Chat(),
    ):
        """Compiles tokenizer.chat_template.

        Args:
            tokenizer: the tokenizer whose template it is.
            say: called with a line about each part of the conversations that the template leaves out.
            chat: what of the conversations is trained.

        Raises:
            UserError: the tokenizer has no template, or several without a default; the template is not valid Jinja.
        """
        source = tokenizer.chat_template
        if isinstance(source, dict):
            source = source.get("default")
        if not source:
            raise UserError(
                "the tokenizer has no chat template; set chat.template (a name, such as chatml, or a file), use "
                "the tokenizer of a chat model, or set prompt_format for data of type instruction"
            )
        self._encode = Encoder(tokenizer)
        self._template = Template(source)
        self._variables = dict(tokenizer.special_tokens_map)
        stops = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        stops.discard(str(tokenizer.bos_token))
        if tokenizer.eos_token is not None:
            stops.add(str(tokenizer.eos_token))
        self._stops = tuple(sorted(stops, key=len, reverse=True))
        self._say, self._chat = say, chat
        self._tried: set[Kind] = set()
        self._control_tokens_said = False

    def prompt(self, messages: list[Message], tools: list[Any] | None = None) -> list[int]:
        """Tokens of the conversation up to where the assistant's next message begins, as they are in training.

        chat.response_prefix follows them.
        """
        messages, tools = self._written(messages, tools)
        text = self._render(messages, tools, add_generation_prompt=True)[0]
        return self._encode([Rendered(text + (self._chat.response_prefix or ""))])[0].tokens.tolist()

    def turn_end(self) -> str | None:
        """The special token that ends an assistant's turn; None if the template has none."""
        exchange = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        return self._stop(self._render(exchange, None)[0])

    def render(self, messages: list[Message], tools: list[Any] | None = None) -> Rendered:
        """The whole conversation as text; its trained spans are the assistant's turns with their stop tokens.

        Templates with `{% generation %}` mark what is trained. For others, a turn starts where the prompt made of the
        messages before it ends, and stops with the special token that ends the conversation when it is cut after the
        turn. Some templates render a turn differently once more messages follow (Qwen3 leaves out earlier thoughts), so
        that the prompt is not a prefix of the whole text. There the turn starts after its header, the text that
        add_generation_prompt appends.

        The section chat says which messages are trained and with which weight; another role's is found by its content.
        Keys of messages, whole messages and tools that the template leaves out are reported through `say`.

        Raises:
            Refused: no message is trained; or a turn renders as nothing, without its tool call or without a stop
                token, or cannot be found in the text.
            UserError: the template refuses the conversation or exceeds its limits.
        """
        chosen = masks.trained(messages, self._chat)
        if not chosen:
            raise Refused(f"the conversation has no {' or '.join(self._chat.roles)} message that is to be trained")
        messages = [message | {"train": i in chosen} for i, message in enumerate(messages)]
        messages, tools = self._written(messages, tools)
        chosen = [i for i, message in enumerate(messages) if message.get("train", masks.everything(self._chat))]
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        text, spans = self._render(messages, tools)
        if not spans:
            spans = self._find_turns(messages, tools, turns, text)
        elif unmarked := next((span for span in spans if self._stop(text[slice(*span)]) is None), None):
            raise Refused(f"{{% generation %}} holds no stop token at its end: {clip(text[slice(*unmarked)])!r}")
        refuse_lost_answers(messages, turns, spans, text, self._stop)
        for line in left_out(messages, tools, text, lambda *changed: self._render(*changed)[0], self._tried):
            self._say(line)
        self._say_control_tokens(messages)
        if len(spans) != len(turns):
            unlike = [i for i in turns if i not in chosen or "loss_scale" in messages[i]]
            if unlike:
                raise Refused(
                    f"message {unlike[0]} is not to be trained, or has a weight of its own, but it is unclear which "
                    "{% generation %} mark is its"
                )
            parts, others = [self._part(text, span, {}) for span in spans], []
        else:
            own = list(zip(turns, spans))
            parts = [self._part(text, span, messages[i]) for i, span in own if i in chosen]
            others = [span for i, span in own if i not in chosen]
        of_others = [i for i in range(len(messages)) if i not in turns]
        if masks.everything(self._chat):
            unwanted = [self._found(text, messages, tools, i) for i in of_others if i not in chosen]
            others += [(part.start, part.end) for part in unwanted]
        else:
            parts += [self._found(text, messages, tools, i) for i in of_others if i in chosen]
        weighted = list(masks.weigh(text, sorted(parts, key=attrgetter("start")), others, self._chat))
        weights = tuple(weight for _, weight in weighted)
        return Rendered(text, tuple(span for span, _ in weighted), weights=None if set(weights) <= {1} else weights)

    def _written(self, messages: list[Message], tools: list[Any] | None) -> tuple[list[Message], list[Any] | None]:
        """The conversation as the template takes it.

        Tools are text where chat.agent_template says so. The arguments of calls are JSON text where the template fails
        on objects, or writes them as Python does (DeepSeek-V3's).
        """
        if self._chat.agent_template:
            return as_text(self._chat.agent_template, messages, tools), None
        calls = [call.get("function", call) for message in messages for call in message.get("tool_calls", ())]
        if not calls:
            return messages, tools
        try:
            text = self._render(messages, tools)[0]
        except UserError as error:
            try:
                self._render(with_text_arguments(messages), tools)
            except UserError:
                raise error from None
            return with_text_arguments(messages), tools
        objects = [arguments for call in calls if isinstance(arguments := call.get("arguments"), dict) and arguments]
        as_python = any(str(arguments) in text for arguments in objects)
        return with_text_arguments(messages) if as_python else messages, tools

    def _part(self, text: str, span: Span, message: Message) -> masks.Part:
        """An assistant's turn."""
        whole = text[slice(*span)].rstrip()
        stop = span[0] + len(whole) - len(self._stop(whole) or "")
        return masks.Part(span[0], stop, span[1], message.get("loss_scale"))

    def _found(self, text: str, messages: list[Message], tools: list[Any] | None, i: int) -> masks.Part:
        """A message of another role, and the special token that follows it."""
        found = self._content(text, messages, tools, i)
        if not found:
            raise Refused(f"message {i} ({messages[i]['role']}) cannot be found: the template changes its text")
        start, stop = found[0]
        return masks.Part(start, stop, stop + len(self._begins(text, stop) or ""), messages[i].get("loss_scale"))

    def _say_control_tokens(self, messages: list[Message]) -> None:
        """Says, once, that a message's text holds one of the tokenizer's special tokens, and so becomes that token."""
        pairs = ((message["role"], stop) for message in messages for stop in self._stops if stop in message["content"])
        if not self._control_tokens_said and (found := next(pairs, None)):
            self._control_tokens_said = True
            role, stop = found
            self._say(
                f"the text of a message of role {role!r} holds {stop}, which becomes that special token, as in "
                "transformers; take it out where others wrote the text"
            )

    def _find_turns(self, messages: list[Message], tools: list[Any] | None, turns: list[int], text: str) -> list[Span]:
        """Where each of the assistant's turns is in the whole text, with the stop token that ends it."""
        spans, end = [], 0
        for i in turns:
            start = self._start(text, messages[:i], tools, end, len(turns))
            end = self._end(text, messages, tools, i, start)
            spans.append((start, end))
        return spans

    def _start(self, text: str, before: list[Message], tools: list[Any] | None, position: int, turns: int) -> int:
        """Where the assistant's answer to the messages `before` starts in the whole text, not before `position`."""
        prompt = self._render(before, tools, add_generation_prompt=True)[0]
        if len(prompt) >= position and text.startswith(prompt):
            return len(prompt)
        header = prompt.removeprefix(self._render(before, tools)[0])
        if header in ("", prompt) or text.count(header) != turns:
            raise Refused(
                f"message {len(before)} (assistant) cannot be found in the rendered text: the template writes it "
                "differently once more messages follow. End the conversation with it, or use a template with "
                "{% generation %} marks"
            )
        if (found := text.find(header, position)) < 0:
            raise Refused(f"message {len(before)} (assistant) cannot be found after the end of the one before it")
        return found + len(header)

    def _end(self, text: str, messages: list[Message], tools: list[Any] | None, i: int, start: int) -> int:
        """Where turn i, which starts at `start`, ends in the whole text: after the stop token.

        That may be another one than where the conversation is cut: gpt-oss ends only the last turn in <|return|>.
        """
        cut = (text if i == len(messages) - 1 else self._render(messages[: i + 1], tools)[0]).rstrip()
        stop = self._stop(cut)
        if stop is None:
            raise Refused(f"message {i} (assistant) renders without a stop token at its end: {clip(cut[start:])!r}")
        if stop in messages[i]["content"]:
            raise Refused(f"message {i} (assistant) holds the stop token {stop} in its text")
        before = cut.removesuffix(stop)
        if text.startswith(before):
            ends = [len(before)]
        else:
            ends = [end for begin, end in self._content(text, messages, tools, i) if begin >= start]
        for end in ends:
            if found := self._begins(text, end):
                return end + len(found)
        if stop not in text[start:]:
            raise Refused(f"message {i} (assistant) has no stop token in the whole conversation")
        return text.index(stop, start) + len(stop)

    def _content(self, text: str, messages: list[Message], tools: list[Any] | None, i: int) -> list[Span]:
        """Where the content of message i is in the whole text, if it is there as it is: with marks around it, found."""
        content = messages[i]["content"]
        inner = content.strip()
        if not inner:
            return []
        marked = messages[i] | {"content": content.replace(inner, OPEN + inner + CLOSE, 1)}
        whole, spans = self._render([*messages[:i], marked, *messages[i + 1 :]], tools)
        return [span for span in spans if whole == text and text[slice(*span)] == inner]

    def _begins(self, text: str, position: int) -> str | None:
        """The special token that follows `position`."""
        return next((stop for stop in self._stops if text.startswith(stop, position)), None)

    def _stop(self, text: str) -> str | None:
        """The special token that a turn ends in, white space aside."""
        text = text.rstrip()
        return next((stop for stop in self._stops if text.endswith(stop)), None)

    def _render(
        self, messages: list[Message], tools: list[Any] | None, add_generation_prompt: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        variables = self._variables | {"add_generation_prompt": add_generation_prompt}
        shown = [{key: value for key, value in message.items() if key not in UNSEEN} for message in messages]
        return self._template.render(messages=shown, tools=tools, documents=None, **variables)
