"""Trained characters make trained tokens."""

import json
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from jaxtune.config.schema import Dataset
from jaxtune.data.cache.documents import tokenize
from jaxtune.data.chat.encoding import Encoder, Rendered
from jaxtune.errors import UserError

CORPUS = ["Hello  world, this\nis a test.\n\nAnd that :\n\tthe other, été.\n"] * 20


@pytest.fixture(scope="module")
def merged():
    """Return a tokenizer with real merges that excludes white space from its offsets, like Llama 3's."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=330, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@given(text=st.text("aeé \n.😀:", max_size=40), ends=st.tuples(st.integers(0, 40), st.integers(0, 40)))
@settings(max_examples=200, deadline=None)
def test_a_token_is_trained_if_any_of_its_characters_is(merged, text, ends):
    start, end = sorted(min(end, len(text)) for end in ends)
    [encoded] = Encoder(merged)([Rendered(text, ((start, end),))])
    bytes_of = {character: byte for byte, character in _byte_alphabet().items()}
    pieces = [bytes(bytes_of[c] for c in piece) for piece in merged.convert_ids_to_tokens(encoded.tokens)]
    assert b"".join(pieces).decode() == text
    character_of_byte = [i for i, character in enumerate(text) for _ in character.encode()]
    edges = np.cumsum([0, *map(len, pieces)])
    expected = [any(start <= character < end for character in character_of_byte[a:b]) for a, b in pairwise(edges)]
    assert encoded.loss_weights.astype(bool).tolist() == expected


@given(text=st.text("aeé \n.😀:<|en>", max_size=60))
@settings(max_examples=100, deadline=None)
def test_a_text_that_is_trained_whole_has_the_same_tokens(merged, text):
    """The encoder needs no offsets for it."""
    whole, [part] = Encoder(merged)([Rendered(text), Rendered(text)]), Encoder(merged)([Rendered(text, ((0, 1),))])
    assert all(np.array_equal(one.tokens, part.tokens) and one.loss_weights.all() for one in whole)


def test_prompts_that_end_inside_a_token_are_said(merged, tmp_path):
    """The note has their number and the first: from the prompt, the model would see a token it was not trained on."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=merged.backend_tokenizer, eos_token="<|endoftext|>")
    samples = [{"instruction": "And ", "output": "the"}, {"instruction": "And", "output": " the"}] * 2
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in [samples[1], *samples]))
    entry = Dataset(path=str(tmp_path / "a.jsonl"), prompt_format="{instruction}")
    notes = tokenize((entry,), tokenizer, tmp_path / "cache").notes
    [line] = [note for note in notes if "begins inside a token" in note]
    assert ": 2 samples have an answer that begins inside a token" in line
    assert "a.jsonl:2: in 'And ' + 'the' the token ' th' belongs to both. End the prompt before the space" in line


def test_only_a_prompt_may_end_inside_a_token(merged):
    """Spans that touch are one trained text whose parts have different weights."""
    text = "And the other"
    documents = [Rendered(text, ((0, 4), (4, 13))), Rendered(text, ((3, 13),)), Rendered(text, ((4, 13),))]
    assert [encoded.across for encoded in Encoder(merged)(documents)] == [None, None, (3, 6, 4)]


def _byte_alphabet() -> dict[int, str]:
    """Return GPT-2's printable character for each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(rest)}


def test_settings_left_on_the_tokenizer_do_not_cut_documents(merged):
    merged.backend_tokenizer.enable_truncation(4)
    try:
        [encoded] = Encoder(merged)([Rendered("Hello world, this is a test.")])
    finally:
        merged.backend_tokenizer.no_truncation()
    assert merged.decode(encoded.tokens) == "Hello world, this is a test."


def test_a_text_on_which_the_tokenizer_panics_is_named(merged):
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(merged.backend_tokenizer.to_str()))
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("(a+)+$"), "isolated")
    message = "the tokenizer fails on a text of 61 characters, 'aaa.*: Onig: Regex search error"
    with pytest.raises(UserError, match=message):
        Encoder(tokenizer)([Rendered("fine"), Rendered("a" * 60 + "!")])
