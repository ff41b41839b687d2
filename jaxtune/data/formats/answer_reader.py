"""Answers in the data, for runs that train on them in some steps and on the model's own answers in others."""

import dataclasses

from jaxtune.config.schema import ChatOptions, Dataset
from jaxtune.data.chat.encoding import Encoded, Encoder, Rendered
from jaxtune.data.formats.prompts import Prompt, Sample
from jaxtune.data.formats.sample_formats import Format, detect, make_format
from jaxtune.errors import UserError
from jaxtune.tokenizer_type import Tokenizer


class AnswerReader:
    """Adds documents to prompts: the prompt with the answer in the data, as a run on the data's answers trains it."""

    def __init__(self, tokenizer: Tokenizer, chat: ChatOptions, most_tokens: int):
        """most_tokens: the end of longer documents is cut off."""
        self._tokenizer, self._chat, self._most = tokenizer, chat, most_tokens
        self._encode = Encoder(tokenizer)
        self._formats: dict[tuple[Dataset, frozenset[str]], Format] = {}

    def __call__(self, entry: Dataset, sample: Sample, prompt: Prompt) -> Prompt:
        """Return the prompt with its document. Raises UserError if the sample has no answer in the first tokens."""
        # A document's own options say where its prompt is.
        entry = dataclasses.replace(entry, prompt_field=None)
        key = entry, frozenset(sample)
        if key not in self._formats:
            self._formats[key] = make_format(*detect(entry, sample), self._tokenizer, chat=self._chat)
        made = self._formats[key](sample)
        if not isinstance(made, Encoded | Rendered):  # a RenderedUnit, such as a pair of preferences
            raise UserError("it holds several answers")
        made = made if isinstance(made, Encoded) else self._encode([made])[0]
        document = Encoded(made.tokens[: self._most], made.loss_weights[: self._most])
        if not document.loss_weights.any():
            raise UserError(f"no token of its answer is among the first {self._most} tokens (data.seq_len)")
        return prompt._replace(document=document)
