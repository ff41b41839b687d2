"""Text to tokens: trained characters make trained tokens, and special tokens stand where they should, once."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float16, Int32

from jaxtune.data.cuts import find_cuts, pieces
from jaxtune.errors import UserError

if TYPE_CHECKING:
    from tokenizers import Encoding
    from transformers import PreTrainedTokenizerFast

Span = tuple[int, int]

# The tokenizers library takes 150 bytes for a character while it works, and shares a batch out to all cores by pieces.
_BATCH_CHARS = 2**16
_PIECE_CHARS = 2**11


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

    The tokens are those of the whole text, as it would be tokenised at inference, and the tokenizer's offsets tell
    which characters a token covers. A large text is tokenised in pieces if that is known to make no difference. A
    tokenizer that starts every text with a beginning-of-sequence token does so here too, unless the text (a rendered
    chat template) brings its own: there is never a second one.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerFast",
        advance: Callable[[int], object] = lambda characters: None,
        piece_chars: int = _PIECE_CHARS,
    ):
        """Takes the tokenizer's rules, without what was set on it for other uses.

        Args:
            tokenizer: a fast tokenizer.
            advance: told how many more characters are tokenised, again and again.
            piece_chars: a text is cut after that many characters, at the next place where it can be.

        Raises:
            UserError: it is not a fast tokenizer, and knows no offsets.
        """
        if not tokenizer.is_fast:
            raise UserError(f"{type(tokenizer).__name__} is no fast tokenizer; a tokenizer.json is needed")
        bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
        starts_with_bos = bos is not None and tokenizer("a").input_ids[0] == bos
        self._bos = np.array(bos, np.int32).tobytes() if starts_with_bos else b""
        self._eos = np.array(eos, np.int32).tobytes() if eos is not None else b""
        self._backend = copy.deepcopy(tokenizer.backend_tokenizer)
        self._backend.no_truncation()
        self._backend.no_padding()
        # It would add special tokens, and for some tokenizers cut white space off the offsets.
        self._backend.post_processor = None
        self._cut = find_cuts(self._backend)
        self._advance, self._piece_chars = advance, piece_chars

    def __call__(self, documents: list[Rendered]) -> list[Encoded]:
        """Tokens and weights of each document."""
        finished = []
        tokens, weights = bytearray(), bytearray()  # these grow in place; arrays to be joined would be there twice
        for batch in self._batches(documents):
            texts = [document.text[start:stop] for document, start, stop in batch]
            encodings = self._backend.encode_batch(texts, add_special_tokens=False)
            for (document, start, stop), encoding in zip(batch, encodings):
                tokens += np.array(encoding.ids, np.int32).tobytes()
                weights += _weights(document.spans, start, encoding).tobytes()
                if stop == len(document.text):
                    finished.append(self._finish(document, tokens, weights))
                    tokens, weights = bytearray(), bytearray()
            del encodings  # the next ones need the memory
            self._advance(sum(map(len, texts)))
        return finished

    def _batches(self, documents: list[Rendered]) -> Iterator[list[tuple[Rendered, int, int]]]:
        """All documents in pieces, (document, start, stop), as many at once as keep all cores busy."""
        batch, characters = [], 0
        for document in documents:
            for start, stop in pieces(document.text, self._cut, self._piece_chars):
                batch.append((document, start, stop))
                characters += stop - start
                if characters >= _BATCH_CHARS:
                    yield batch
                    batch, characters = [], 0
        yield batch

    def _finish(self, document: Rendered, tokens: bytearray, weights: bytearray) -> Encoded:
        """The arrays, with the tokens that start and end every text."""
        if not tokens.startswith(self._bos):
            tokens[:0], weights[:0] = self._bos, np.float16(0).tobytes()
        if document.append_eos and not tokens.endswith(self._eos):
            tokens += self._eos
            weights += np.float16(1).tobytes()
        return Encoded(np.frombuffer(tokens, np.int32), np.frombuffer(weights, np.float16))


def _weights(spans: tuple[Span, ...] | None, start: int, encoding: "Encoding") -> Float16[np.ndarray, "n"]:
    """The weights of a piece's tokens; it begins at character `start` of its document."""
    if spans is None:
        return np.ones(len(encoding), np.float16)
    weights = np.zeros(len(encoding), np.float16)
    offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2) + start
    for begin, end in spans:
        weights[np.maximum(offsets[:, 0], begin) < np.minimum(offsets[:, 1], end)] = 1
    return weights
