"""Render conversations with the chat template. The assistant's turns are trained, each with the token that ends it."""

import re
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any

from jaxtune.config.schema import ChatOptions
from jaxtune.data.chat import masks
from jaxtune.data.chat.agents import as_text
from jaxtune.data.chat.encoding import Encoder, Rendered, Span, UntrainableSample
from jaxtune.data.chat.left_out import Kind, find_ignored_content, refuse_empty_answers, refuse_lost_answers
from jaxtune.data.chat.messages import UNSEEN, Message, clip, split_parts, with_text_arguments
from jaxtune.data.chat.sandbox import Template
from jaxtune.data.chat.turns import Conversation, missing_token, missing_token_error
from jaxtune.errors import UserError
from jaxtune.tokenizer_type import Tokenizer

MARK = re.compile(r"{%[-+]?\s*generation\b")  # {%- and {%+ control white space


def source_of(tokenizer: Tokenizer) -> str | None:
    """Return the Jinja source of the tokenizer's chat template, the default one of several."""
    source = tokenizer.chat_template
    return source.get("default") if isinstance(source, dict) else source


class ChatTemplate:
    """A tokenizer's chat template."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        say: Callable[[str], object] = lambda line: None,
        chat: ChatOptions = ChatOptions(),
    ):
        """Compiles tokenizer.chat_template.

        Args:
            tokenizer: the tokenizer whose template it is.
            say: called with a line about each part of the conversations that the template leaves out.
            chat: the section chat, which selects the messages to train.

        Raises:
            UserError: the tokenizer has no template, or several without a default; the template is not valid Jinja.
        """
        source = source_of(tokenizer)
        if not source:
            raise UserError(
                "the tokenizer has no chat template; set chat.template (a name, such as chatml, or a file), use "
                "the tokenizer of a chat model, or set prompt_format for data of type instruction"
            )
        self._encode = Encoder(tokenizer)
        self._template = Template(source)
        self._variables = dict(tokenizer.special_tokens_map)
        # Candidates for the token that ends a turn. A beginning-of-sequence token never does.
        stops = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        stops.discard(str(tokenizer.bos_token))
        self._eos = None if tokenizer.eos_token is None else str(tokenizer.eos_token)
        if self._eos is not None:
            stops.add(self._eos)
        # Longest first, because one token may begin with another.
        self._stops = tuple(sorted(stops, key=len, reverse=True))
        # Without a special token, this matches nothing.
        self._special = re.compile("|".join(map(re.escape, self._stops)) or r"(?!)")
        self._vocabulary = tokenizer.get_vocab
        self._say, self._chat = say, chat
        self._tried: set[Kind] = set()
        self._control_tokens_said = self._unwritten_said = False

    def prompt(self, messages: list[Message], tools: list[Any] | None = None) -> list[int]:
        """Return the tokens of the prompt of the assistant's next message, the same as in training.

        They end with chat.response_prefix.
        """
        return self.encode(self.text(messages, tools, answered=False))

    def text(self, messages: list[Message], tools: list[Any] | None = None, *, answered: bool = True) -> str:
        """Return the text of a conversation; unless it is `answered`, with the beginning of the assistant's message."""
        if not answered:
            return self.prompt_text(messages, tools) + (self._chat.response_prefix or "")
        return self._render(*self._written(messages, tools))[0]

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a rendered text."""
        return self._encode([Rendered(text)])[0].tokens.tolist()

    def prompt_text(self, messages: list[Message], tools: list[Any] | None = None, **variables: Any) -> str:
        """Return the prompt of the assistant's next message, without chat.response_prefix.

        variables: further variables of the template, such as enable_thinking.
        """
        return self._render(*self._written(messages, tools), add_generation_prompt=True, **variables)[0]

    def special_token_in(self, text: str) -> str | None:
        """Return the first special token of the tokenizer that a text holds; None if it holds none."""
        return None if (match := self._special.search(text)) is None else match[0]

    def turn_end(self) -> str | None:
        """Return the special token that ends an assistant's turn; None if the template has none."""
        exchange = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        text, spans = self._render(exchange, None)
        try:
            if not spans:
                conversation = self._conversation(exchange, None, text)
                spans, text = conversation.turns([1]), conversation.text
        except UserError:  # real conversations may still render: their own errors are reported then
            return self._stop(text)
        return next(filter(None, (self._stop(text[slice(*span)]) for span in spans)), None)

    def render(self, messages: list[Message], tools: list[Any] | None = None) -> Rendered:
        """Render the whole conversation as text; the trained spans are the assistant's turns with their stop tokens.

        Templates with `{% generation %}` mark the trained text. With other templates, a turn starts at the end of the
        prompt made of the messages before it, and stops with its own stop token, not with one that ends the whole
        conversation (`turns.Conversation`). Some templates drop the end of the prompt (an empty thought) from earlier
        turns: then the turn starts after the text that the template writes before an answer. If a template writes no
        token that ends a turn (GLM's), each turn, the last one too, ends with the token that begins the next message.

        The section chat selects the messages to train and their weights; messages of other roles are located by their
        content. Keys of messages, whole messages and tools that the template leaves out are reported through `say`.

        Raises:
            Refused: no message is trained; or a turn is empty, renders as nothing, without its tool call or a stop
                token, or cannot be found in the text.
            UserError: the template refuses the conversation or exceeds its limits.
        """
        chosen = set(masks.trained_messages(messages, self._chat))
        if not chosen:
            raise UntrainableSample(
                f"the conversation has no {' or '.join(self._chat.roles)} message that is to be trained"
            )
        # The choice is stored in the messages, because `_written` may merge or replace them (chat.agent_template).
        messages = [message | {"train": i in chosen} for i, message in enumerate(messages)]
        messages, tools = self._written(messages, tools)
        chosen = [i for i, message in enumerate(messages) if message.get("train", masks.trains_everything(self._chat))]
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        refuse_empty_answers(messages, turns)
        wanted, turned = set(chosen), set(turns)
        written, spans = self._render(messages, tools)
        text, conversation = written, partial(self._conversation, messages, tools, written)
        if not spans:
            places = conversation()
            spans, text = places.turns(turns), places.text
            self._say_unwritten(places.unwritten)
        elif unmarked := next((span for span in spans if self._stop(text[slice(*span)]) is None), None):
            if missing := missing_token(text[slice(*unmarked)], self._vocabulary()):
                raise missing_token_error(missing)
            raise UntrainableSample(
                f"{{% generation %}} holds no stop token at its end: {clip(text[slice(*unmarked)])!r}"
            )
        refuse_lost_answers(messages, turns, spans, text, self._stop)
        for line in find_ignored_content(
            messages, tools, written, lambda *changed: self._render(*changed)[0], self._tried
        ):
            self._say(line)
        self._say_control_tokens(messages)
        # If a template marks more or fewer blocks than there are turns, it is unclear which block is whose: all blocks
        # are trained alike, or the sample is refused.
        if len(spans) != len(turns):
            unlike = [i for i in turns if i not in wanted or "loss_scale" in messages[i]]
            if unlike:
                raise UntrainableSample(
                    f"message {unlike[0]} is not to be trained, or has a weight of its own, but it is unclear which "
                    "{% generation %} mark is its"
                )
            parts, untrained = [self._part(text, span, {}) for span in spans], []
        else:
            numbered = list(zip(turns, spans))
            parts = [self._part(text, span, messages[i]) for i, span in numbered if i in wanted]
            untrained = [span for i, span in numbered if i not in wanted]
        everything = masks.trains_everything(self._chat)
        # Messages of other roles: those that are trained, or with chat.loss_scale='all' those that are not.
        if other_roles := [i for i in range(len(messages)) if i not in turned and (i in wanted) != everything]:
            places = conversation()
            located = [self._locate(text, messages, places, i) for i in other_roles]
            if everything:
                untrained += [(part.start, part.end) for part in located]
            else:
                parts += located
        weighted = list(masks.weighted_spans(text, sorted(parts, key=attrgetter("start")), untrained, self._chat))
        weights = tuple(weight for _, weight in weighted)
        return Rendered(text, tuple(span for span, _ in weighted), weights=None if set(weights) <= {1} else weights)

    def _written(self, messages: list[Message], tools: list[Any] | None) -> tuple[list[Message], list[Any] | None]:
        """Return the messages and tools in the form that the template takes.

        With chat.agent_template, tools and calls become text. The arguments of calls become JSON text if the template
        fails on objects, or writes them in Python's notation (DeepSeek-V3's).
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
                # The error about the messages as the user wrote them says more than the one about the changed messages.
                raise error from None
            return with_text_arguments(messages), tools
        objects = [arguments for call in calls if isinstance(arguments := call.get("arguments"), dict) and arguments]
        # A dict written by {{ arguments }} has Python's notation, with single quotes; models expect JSON.
        as_python = any(str(arguments) in text for arguments in objects)
        return with_text_arguments(messages) if as_python else messages, tools

    def _part(self, text: str, span: Span, message: Message) -> masks.TrainedMessage:
        """Return the trained part of an assistant's turn."""
        # Some templates write a line break after the token that ends a turn. It counts as part of the end.
        whole = text[slice(*span)].rstrip()
        stop = span[0] + len(whole) - len(self._stop(whole) or "")  # the text ends where the token begins
        return masks.TrainedMessage(span[0], stop, span[1], message.get("loss_scale"))

    def _locate(self, text: str, messages: list[Message], places: Conversation, i: int) -> masks.TrainedMessage:
        """Locate a message of another role, and the special token that follows it."""
        content = places.content(i)
        if content is None:
            raise UntrainableSample(
                f"message {i} ({messages[i]['role']}) cannot be found: the template changes its text"
            )
        start, stop = content
        return masks.TrainedMessage(
            start, stop, stop + len(self._begins(text, stop) or ""), messages[i].get("loss_scale")
        )

    def _say_control_tokens(self, messages: list[Message]) -> None:
        """Report, once, that a message's text holds a special token of the tokenizer, and so becomes that token."""
        pairs = (
            (message["role"], token) for message in messages for token in self._special.findall(message["content"])
        )
        if not self._control_tokens_said and (pair := next(pairs, None)):
            self._control_tokens_said = True
            role, token = pair
            self._say(
                f"the text of a message of role {role!r} holds {token}, which becomes that special token, as in "
                "transformers; remove it from text that others wrote"
            )

    def _say_unwritten(self, stop: str | None) -> None:
        """Report, once, that turns end with the token that begins the next message."""
        if stop and not self._unwritten_said:
            self._unwritten_said = True
            self._say(
                f"the chat template writes no token that ends a turn; {stop}, with which the next message begins, is "
                "trained as the end, after the last turn too"
            )

    def _conversation(self, messages: list[Message], tools: list[Any] | None, text: str) -> Conversation:
        def render(*conversation: Any, **variables: Any) -> str:
            return self._render(*conversation, **variables)[0]

        return Conversation(render, self._special, self._eos, self._vocabulary, messages, tools, text)

    def _begins(self, text: str, position: int) -> str | None:
        """Return the special token at `position`, if there is one."""
        return next((stop for stop in self._stops if text.startswith(stop, position)), None)

    def _stop(self, text: str) -> str | None:
        """Return the special token that a turn ends in, ignoring white space after it."""
        text = text.rstrip()
        return next((stop for stop in self._stops if text.endswith(stop)), None)

    def _render(
        self, messages: list[Message], tools: list[Any] | None, **more: Any
    ) -> tuple[str, list[tuple[int, int]]]:
        variables = self._variables | {"add_generation_prompt": False} | more  # bos_token and others by name
        # Templates get only the keys that they would get from transformers at inference.
        shown = [{key: value for key, value in message.items() if key not in UNSEEN} for message in messages]
        if any("images" in message for message in messages):  # else no text has images, whatever it holds
            shown = [message | {"content": split_parts(message["content"])} for message in shown]
        return self._template.render(messages=shown, tools=tools, documents=None, **variables)
