"""Text to tokens: trained characters make trained tokens, and special tokens stand where they should, once."""

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float16, Int32

from jaxtune.errors import UserError

if TYPE_CHECKING:
    from tokenizers import Encoding
    from transformers import PreTrainedTokenizerFast

Span = tuple[int, int]


class Refused(UserError):
    """A sample that can be read but not trained on: nothing in it is a target, or a trained turn never stops."""


@dataclass(frozen=True)
class Rendered:
    """A sample as text.

    Attributes:
        text: the whole document.
        spans: (start, end) in characters of what is trained; None trains all of it.
        append_eos: whether the end-of-sequence token follows (and is trained), unless the text ends in it.
    """

    text: str
    spans: tuple[Span, ...] | None = None
    append_eos: bool = False


@dataclass(frozen=True)
class Encoded:
    """A sample as tokens; loss_weights[i] is the weight of predicting tokens[i]."""

    tokens: Int32[np.ndarray, "n"]
    loss_weights: Float16[np.ndarray, "n"]


class Encoder:
    """Text to tokens. A token is trained if any of its characters is.

    The whole text is tokenised at once, as it would be at inference, and the tokenizer's offsets tell which characters
    a token covers. A tokenizer that starts every text with a beginning-of-sequence token does so here too, unless the
    text (a rendered chat template) brings its own: there is never a second one.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerFast"):
        """Takes the tokenizer's rules, without what was set on it for other uses.

        Raises:
            UserError: it is not a fast tokenizer, and knows no offsets.
        """
        if not tokenizer.is_fast:
            raise UserError(f"{type(tokenizer).__name__} is no fast tokenizer; a tokenizer.json is needed")
        self._bos, self._eos = tokenizer.bos_token_id, tokenizer.eos_token_id
        self._starts_with_bos = self._bos is not None and tokenizer("a").input_ids[0] == self._bos
        self._backend = copy.deepcopy(tokenizer.backend_tokenizer)
        self._backend.no_truncation()
        self._backend.no_padding()
        # It would add special tokens, and for some tokenizers cut white space off the offsets.
        self._backend.post_processor = None

    def __call__(self, documents: list[Rendered]) -> list[Encoded]:
        """Tokens and weights of each document."""
        encodings = self._backend.encode_batch([document.text for document in documents], add_special_tokens=False)
        return [self._finish(document, encoding) for document, encoding in zip(documents, encodings)]

    def _finish(self, document: Rendered, encoding: "Encoding") -> Encoded:
        tokens = encoding.ids
        if document.spans is None:
            weights = np.ones(len(tokens), np.float16)
        else:
            offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)
            weights = np.zeros(len(tokens), np.float16)
            for start, end in document.spans:
                weights[np.maximum(offsets[:, 0], start) < np.minimum(offsets[:, 1], end)] = 1
        if self._starts_with_bos and tokens[:1] != [self._bos]:
            tokens, weights = [self._bos, *tokens], np.insert(weights, 0, 0)
        if document.append_eos and self._eos is not None and tokens[-1:] != [self._eos]:
            tokens, weights = [*tokens, self._eos], np.append(weights, np.float16(1))
        return Encoded(np.array(tokens, np.int32), weights)
