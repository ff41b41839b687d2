"""Text to tokens: trained characters make trained tokens, and special tokens stand where they should, once."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float16, Int32
from transformers import PreTrainedTokenizerFast

from jaxtune.errors import UserError

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


def encode(tokenizer: PreTrainedTokenizerFast, documents: list[Rendered]) -> list[Encoded]:
    """Tokenises documents; a token is trained if any of its characters is.

    The whole text is tokenised at once, as it would be at inference, and the tokenizer's offsets tell which characters
    a token covers. A tokenizer that starts every text with a beginning-of-sequence token does so here too, unless the
    text (a rendered chat template) brings its own: there is never a second one.
    """
    if not documents:
        return []
    if not tokenizer.is_fast:
        raise UserError(f"tokenizer: {type(tokenizer).__name__} knows no character offsets; a tokenizer.json is needed")
    encoded = tokenizer(
        [document.text for document in documents],
        add_special_tokens=False,
        return_offsets_mapping=any(document.spans is not None for document in documents),
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,
    )
    starts_with_bos = adds_bos(tokenizer)
    result = []
    for i, document in enumerate(documents):
        tokens = encoded["input_ids"][i]
        if document.spans is None:
            weights = np.ones(len(tokens), np.float16)
        else:
            weights = _covered(encoded["offset_mapping"][i], document.spans).astype(np.float16)
        if starts_with_bos and tokens[:1] != [tokenizer.bos_token_id]:
            tokens, weights = [tokenizer.bos_token_id, *tokens], np.concatenate([[0], weights])
        eos = tokenizer.eos_token_id
        if document.append_eos and eos is not None and tokens[-1:] != [eos]:
            tokens, weights = [*tokens, eos], np.concatenate([weights, [1]])
        result.append(Encoded(np.asarray(tokens, np.int32), weights.astype(np.float16)))
    return result


def adds_bos(tokenizer: PreTrainedTokenizerFast) -> bool:
    """Whether the tokenizer by itself starts a text with its beginning-of-sequence token."""
    return tokenizer.bos_token_id is not None and tokenizer("a").input_ids[0] == tokenizer.bos_token_id


def _covered(offsets: list[Span], spans: tuple[Span, ...]) -> np.ndarray:
    """Whether each token covers a character of a span.

    Only the ends of the offsets are used, a token reaching back to the end of the one before: some tokenizers leave
    leading white space out of a token's offsets, and the tokens of one split character all have the same.
    """
    ends = np.array([end for _, end in offsets], np.int64)
    before = np.concatenate([[0], ends[:-1]])
    covered = np.zeros(len(ends), bool)
    for start, end in spans:
        covered |= (ends > start) & ((ends <= end) | (before < end))
    return covered
