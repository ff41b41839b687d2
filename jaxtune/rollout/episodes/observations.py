"""The tokens of an observation, after an assistant's turn that is there as tokens and is not rendered again."""

from collections.abc import Sequence
from typing import Any

from jaxtune.data.chat.chat_template import ChatTemplate
from jaxtune.data.chat.messages import Message
from jaxtune.errors import UserError
from jaxtune.tokenizer_type import Tokenizer

_ANSWER = "jaxtune_probe_answer"


class Observations:
    """Renders observations, as TRL does: after a made-up turn, whose own text is cut off."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, stops: frozenset[int]):
        """`stops`: tokens that end an answer."""
        self._template = template
        self._stops = sorted((str(token) for token in tokenizer.convert_ids_to_tokens(sorted(stops))), key=len)
        self._special = sorted(map(str, tokenizer.all_special_tokens), key=len)

    def check(self, role: str) -> None:
        """Raise UserError if the chat template cannot write a message of this role after an answer."""
        message: Message = {"role": role, "name": "tool", "content": "observation"}
        text = self._text([message])
        if "observation" not in text or _ANSWER not in text:
            raise UserError(
                f"the chat template leaves out messages of role {role!r} after an answer; choose another "
                "chat.template, or set chat.agent_template='hermes'"
            )
        self.tokens([message], stopped=False)

    def tokens(self, observed: Sequence[Message], stopped: bool) -> list[int]:
        """Return the tokens between an answer and the next one.

        Args:
            observed: results of tools, or messages of other roles.
            stopped: whether the answer has the token that ends it; otherwise the tokens begin with it.

        Raises:
            UserError: the chat template writes no token that ends an answer.
        """
        text = self._text(observed)
        after = text.rfind(_ANSWER) + len(_ANSWER)
        # Before the observation, which may hold special tokens itself. Some templates change its text.
        until = text.find(observed[0]["content"] or "\0", after)
        until = len(text) if until < 0 else until
        # The first token after the turn that ends an answer; in some templates another special token stands for it.
        for tokens in (self._stops, self._special):
            places = [place for token in tokens if (place := text.find(token, after, until)) >= 0]
            if places:
                break
        else:
            raise UserError("the chat template writes no special token after an answer, so no result can follow it")
        head, whole = self._template.encode(text[: min(places)]), self._template.encode(text)
        if whole[: len(head)] != head:
            raise UserError(
                "the chat template's end of an answer is not a token of its own, so no result can follow it"
            )
        return whole[len(head) + stopped :]

    def _text(self, observed: Sequence[Message]) -> str:
        """Return the text of a made-up question and answer and what follows it, up to the next answer."""
        answer: Message = {"role": "assistant", "content": _ANSWER}
        if observed[0]["role"] == "tool":
            # By the name of the real tool: some templates (gpt-oss) write it before the result.
            function: dict[str, Any] = {"name": observed[0]["name"], "arguments": {"argument": _ANSWER}}
            answer |= {"content": "", "tool_calls": [{"type": "function", "function": function}]}
        return self._template.text([{"role": "user", "content": "question"}, answer, *observed], answered=False)
