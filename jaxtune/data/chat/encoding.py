"""Tokenise texts: trained characters give trained tokens, and tokens that begin or end a text are never doubled."""

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import repeat
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float16, Int32

from jaxtune.data.chat.cuts import find_cuts, pieces
from jaxtune.data.chat.messages import clip
from jaxtune.errors import UserError, is_failure
from jaxtune.image_layout import ImageRef
from jaxtune.tokenizer_type import Tokenizer

if TYPE_CHECKING:
    from tokenizers import Encoding

Span = tuple[int, int]

# The tokenizers library needs 150 bytes for each character of a batch, and spreads a batch's pieces over all cores.
_BATCH_CHARS = 2**16  # 65,536 characters: about 10 MB
_PIECE_CHARS = 2**11  # 32 pieces a batch


class UntrainableSample(UserError):
    """A sample that can be read but not trained on: no token is a target, or a trained turn has no stop token."""


@dataclass(frozen=True)
class Rendered:
    """A sample as text.

    Attributes:
        text: the whole document.
        spans: (start, end) of each trained part, in characters; None: the whole text is trained.
        append_eos: whether to append the end-of-sequence token, trained, unless the text ends with it.
        label: the document's label, if documents are classified; then no token is trained.
        weights: weight of each span; None: 1 each.
        images: the images, in the order of their tokens in the text.
    """

    text: str
    spans: tuple[Span, ...] | None = None
    append_eos: bool = False
    label: float | None = None
    weights: tuple[float, ...] | None = None
    images: tuple[ImageRef, ...] = ()


@dataclass(frozen=True)
class RenderedUnit:
    """A sample as a unit of documents that share a row.

    Attributes:
        documents: one or two answers, each after the prompt; or questions on the same state.
        values: values of the unit's other columns, by name.
        answered: whether the documents are answers, which have trained tokens.
    """

    documents: tuple[Rendered, ...]
    values: Mapping[str, Any]
    answered: bool = True


@dataclass(frozen=True)
class Encoded:
    """A sample as tokens.

    Attributes:
        tokens: the tokens.
        loss_weights: loss_weights[i] is the weight of predicting tokens[i].
        across: (start, end, edge) in characters of the first token inside which a trained span begins, at `edge`; None:
            there is no such token.
        images: the images, in the order of their tokens.
    """

    tokens: Int32[np.ndarray, "n"]
    loss_weights: Float16[np.ndarray, "n"]
    across: tuple[int, int, int] | None = None
    images: tuple[ImageRef, ...] = ()


class Encoder:
    """Tokenises texts. A token is trained if any of its characters is, with the largest weight of its characters.

    The whole text is tokenised in one go, as at inference, and the tokenizer's offsets give the characters of each
    token. A large text is tokenised in pieces if that is known to give the same tokens (`cuts`). A tokenizer that
    starts every text with a beginning-of-sequence token does so here too, unless the text (a rendered chat template)
    already begins with one.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        advance: Callable[[int], object] = lambda characters: None,
        piece_chars: int = _PIECE_CHARS,
    ):
        """Copy the tokenizer, without truncation, padding and post-processing.

        Args:
            tokenizer: a fast tokenizer.
            advance: called after each batch with the number of characters that it tokenised.
            piece_chars: a text is cut at the first possible place after this many characters.

        Raises:
            UserError: the tokenizer is not a fast one, so it has no offsets.
        """
        if not tokenizer.is_fast:
            raise UserError(f"{type(tokenizer).__name__} is not a fast tokenizer; a tokenizer.json is needed")
        bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
        # Found by encoding a text, because tokenizer classes keep this setting in different places.
        starts_with_bos = bos is not None and tokenizer("a").input_ids[0] == bos
        self._bos = np.array(bos, np.int32).tobytes() if starts_with_bos else b""
        self._eos = np.array(eos, np.int32).tobytes() if eos is not None else b""
        self._backend = copy.deepcopy(tokenizer.backend_tokenizer)
        self._backend.no_truncation()
        self._backend.no_padding()
        # The post-processor would add special tokens, and for some tokenizers trim white space from the offsets.
        self._backend.post_processor = None
        self._cut = find_cuts(self._backend)
        self._advance, self._piece_chars = advance, piece_chars

    def __call__(self, documents: list[Rendered]) -> list[Encoded]:
        """Return the tokens and weights of each document."""
        finished = []
        tokens, weights = bytearray(), bytearray()  # grown in place; joining arrays would take twice the memory
        across = None
        for batch in self._batches(documents):
            texts = [document.text[start:stop] for document, start, stop in batch]
            # Only spans need offsets; computing them takes a fifth of the time.
            encode = self._backend.encode_batch_fast
            if any(document.spans for document, _, _ in batch):
                encode = self._backend.encode_batch
            try:
                encodings = encode(texts, add_special_tokens=False)
            except BaseException as error:  # a panic of the Rust library is not an Exception
                if not is_failure(error):
                    raise
                raise UserError(f"the tokenizer fails on {_describe_failing(encode, texts)}: {error}") from error
            for (document, start, stop), encoding in zip(batch, encodings):
                tokens += np.array(encoding.ids, np.int32).tobytes()
                piece_weights, across_in_piece = _weights(document, start, encoding)
                weights += piece_weights.tobytes()
                across = across or across_in_piece
                if stop == len(document.text):
                    finished.append(self._finish(document, tokens, weights, across))
                    tokens, weights, across = bytearray(), bytearray(), None
            del encodings  # frees their memory before the next batch
            self._advance(sum(map(len, texts)))
        return finished

    def _batches(self, documents: list[Rendered]) -> Iterator[list[tuple[Rendered, int, int]]]:
        """Yield the pieces (document, start, stop) of all documents, in batches large enough to keep all cores busy."""
        batch, characters = [], 0
        for document in documents:
            for start, stop in pieces(document.text, self._cut, self._piece_chars):
                batch.append((document, start, stop))
                characters += stop - start
                if characters >= _BATCH_CHARS:
                    yield batch
                    batch, characters = [], 0
        yield batch

    def _finish(
        self, document: Rendered, tokens: bytearray, weights: bytearray, across: tuple[int, int, int] | None
    ) -> Encoded:
        """Add the tokens that begin and end every text, and return the arrays."""
        # The post-processor that would add these tokens is off (see __init__), so they are added here. Token arrays are
        # compared as bytes; an empty `_bos` or `_eos` matches every text.
        if not tokens.startswith(self._bos):  # the first 4 bytes
            # Weight 0, as nothing comes before it that could predict it.
            tokens[:0], weights[:0] = self._bos, np.float16(0).tobytes()
        if document.append_eos and not tokens.endswith(self._eos):
            tokens += self._eos
            weights += np.float16(1).tobytes()
        ids, loss_weights = np.frombuffer(tokens, np.int32), np.frombuffer(weights, np.float16)
        return Encoded(ids, loss_weights, across, document.images)


def _describe_failing(encode: Callable[..., object], texts: list[str]) -> str:
    """Describe the first text that cannot be tokenised, for an error message."""
    for text in texts:
        try:
            encode([text], add_special_tokens=False)
        except BaseException as error:
            if not is_failure(error):
                raise
            return f"a text of {len(text):,} characters, {clip(repr(text))}"
    return "texts together"


def _weights(
    document: Rendered, start: int, encoding: "Encoding"
) -> tuple[Float16[np.ndarray, "n"], tuple[int, int, int] | None]:
    """Return the loss weights of the tokens of a piece, and its `across`; the piece begins at character `start`."""
    if document.spans is None:
        return np.ones(len(encoding), np.float16), None
    spans = [
        (*span, weight) for span, weight in zip(document.spans, document.weights or repeat(1)) if span[0] < span[1]
    ]
    weights = np.zeros(len(encoding), np.float16)
    if not spans:
        return weights, None
    # float64 holds positions of characters exactly.
    begins, ends, span_weights = np.array(spans, np.float64).T  # (spans,) each
    offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2) + start  # (n, 2); reshape: n may be 0
    # A token overlaps the spans [first, last). Most tokens overlap one at most; the loop takes the rest.
    first, last = np.searchsorted(ends, offsets[:, 0], "right"), np.searchsorted(begins, offsets[:, 1], "left")
    # A token that overlaps no span, or covers no character, is not trained.
    is_trained = (last > first) & (offsets[:, 1] > offsets[:, 0])
    weights[is_trained] = span_weights[first[is_trained]]
    for token in np.flatnonzero(is_trained & (last > first + 1)):
        weights[token] = span_weights[first[token] : last[token]].max()
    # If a span begins where another ends, the text before it is trained too: a token across that edge does no harm.
    edges = begins[~np.isin(begins, ends)]
    next_edge = np.searchsorted(edges, offsets[:, 0], "right")
    crossing = np.flatnonzero(next_edge < np.searchsorted(edges, offsets[:, 1], "left"))
    if not len(crossing):
        return weights, None
    return weights, (*offsets[crossing[0]].tolist(), int(edges[next_edge[crossing[0]]]))
