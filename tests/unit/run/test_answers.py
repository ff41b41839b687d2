"""A text that continues a prompt begins with the space between them; an answer in a chat is a text of its own."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tiny import add_special_tokens
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from jaxtune import hf
from jaxtune.config.schema import ChatOptions, Config, Dataset, ModelOptions, RolloutOptions
from jaxtune.data.formats.prompts import Prompts, Sample
from jaxtune.data.rows.prompt_feed import columns_of
from jaxtune.errors import UserError
from jaxtune.inference import answers
from jaxtune.inference.decode import NextTokens
from jaxtune.inference.generation import Completion, continue_text
from jaxtune.json_file import as_text
from jaxtune.lora.options import LoraOptions
from jaxtune.objectives.options import MtpOptions
from jaxtune.prepare import _in_a_line
from jaxtune.rollout import rollouts
from jaxtune.rollout.completers import Completer
from jaxtune.weights.trusted_code import with_tower

WORDS = ("▁Once", "▁upon", "▁a", "▁time", "▁Sure", ",", ".", "<0xC3>", "<0xA9>", "<unk>")
INST = "{{ bos_token }}{% for m in messages %}[INST] {{ m.content }} [/INST]{% endfor %}"


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of words with the space before them, like SentencePiece; a text's first space is stripped."""
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Metaspace(prepend_scheme="first"), pre_tokenizers.Punctuation()]
    )
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made = add_special_tokens(made, ("<s>", "</s>", "[INST]", "[/INST]"), "<s>", "</s>")
    made.chat_template = INST
    return made


def ids_of(tokenizer: PreTrainedTokenizerFast, *words: str) -> list[int]:
    return list(map(tokenizer.get_vocab().__getitem__, words))


def next_tokens(tokens: list[int]) -> NextTokens:
    return NextTokens(np.array(tokens), np.zeros(len(tokens)), np.zeros(len(tokens)))


def answering(tokenizer, tmp_path, monkeypatch, chat: bool, prefix: str | None = None) -> answers.AnswerGenerator:
    """Return an `AnswerGenerator` whose model answers "upon a time." to every prompt."""
    tokens = ids_of(tokenizer, "▁upon", "▁a", "▁time", ".", "</s>")

    def generate(_: Any, prompts, numbers=None):
        return iter([next_tokens([token] * len(prompts)) for token in tokens])

    monkeypatch.setattr(answers, "make_generate", lambda *_, **__: generate)
    tokenizer.save_pretrained(tmp_path)
    model: Any = SimpleNamespace(graph=None, spec=SimpleNamespace(max_positions=1000, vision=None), linears=None)
    parameters: Any = {"embed.weight": np.zeros(1)}
    config = Config(chat=ChatOptions(response_prefix=prefix))
    return answers.AnswerGenerator(
        answers.Opened(config, model, parameters, tmp_path), answers.SamplingOptions(chat=chat)
    )


@pytest.mark.parametrize(
    ("chat", "prefix", "expected"),
    [(False, None, " upon a time."), (True, None, "upon a time."), (True, "Sure,", "Sure, upon a time.")],
    ids=["text", "chat", "chat with a prefix"],
)
def test_the_space_before_a_continuation_is_kept(tokenizer, tmp_path, monkeypatch, chat, prefix, expected):
    answers_of = answering(tokenizer, tmp_path, monkeypatch, chat, prefix)
    assert [answer.text for answer in answers_of.each([("here", {"prompt": "Once"})])] == [expected]
    assert "".join(answers_of.stream("Once")) == expected


def test_a_run_s_sample_keeps_it(tokenizer, monkeypatch):
    tokens = ids_of(tokenizer, "▁upon", "▁a", "</s>")
    monkeypatch.setattr(
        "jaxtune.inference.generation.make_generate",
        lambda *_, **__: lambda *_: iter([next_tokens([t]) for t in tokens]),
    )
    monkeypatch.setattr("jaxtune.inference.generation.stop_tokens", lambda *_: frozenset(tokens[-1:]))
    model: Any = SimpleNamespace(graph=None, spec=None, folders=SimpleNamespace(tokenizer=None), linears=None)
    parameters: Any = {"embed.weight": np.zeros(1)}
    assert continue_text(model, parameters, tokenizer, "Once") == "Once upon a"
    assert continue_text(model, parameters, tokenizer, "") == "upon a"


@pytest.mark.parametrize(("prefix", "expected"), [(None, "upon a"), ("Sure,", "Sure, upon a")])
def test_rewards_see_the_text_of_the_completion_as_in_trl(tokenizer, monkeypatch, prefix, expected):
    made = Completion(ids_of(tokenizer, "▁upon", "▁a", "</s>"), True)
    scripted = Completer(lambda trained, frozen: None, lambda weights, prompts, numbers, images: [made])  # pyright: ignore
    monkeypatch.setattr(rollouts, "completer", lambda *_: scripted)
    sample: Sample = {"prompt": "Once"} if prefix is None else {"prompt": [{"role": "user", "content": "Once"}]}
    prompt = Prompts(tokenizer, ChatOptions(response_prefix=prefix), texts_are_chat=False)(Dataset(), sample)
    functions: Any = {"r": SimpleNamespace(function=lambda completions, **_: [0.0])}
    config, nothing = Config(rollout=RolloutOptions(("r.py:r",))), SimpleNamespace()
    sampled = rollouts.make_rollouts(config, nothing, tokenizer, functions, Path())  # pyright: ignore
    assert sampled.make(sampled.prepare({}, {}), [prompt], [0]).texts == [expected]


def test_rewards_get_every_column_of_the_data_in_each_step(tokenizer, monkeypatch):
    """Otherwise a step whose prompts all lack a column would call a function without it, and fail."""
    made = Completion(ids_of(tokenizer, "▁upon", "</s>"), True)
    scripted = Completer(lambda trained, frozen: None, lambda weights, prompts, numbers, images: [made])  # pyright: ignore
    monkeypatch.setattr(rollouts, "completer", lambda *_: scripted)
    read = Prompts(tokenizer, ChatOptions(), texts_are_chat=False)
    prompts = [read(Dataset(), sample) for sample in ({"prompt": "Once"}, {"prompt": "Twice", "wanted": "a"})]
    seen: list[Any] = []
    functions: Any = {
        "r": SimpleNamespace(function=lambda wanted, **_: [0.0 for one in wanted if not seen.append(one)])
    }
    config, nothing = Config(rollout=RolloutOptions(("r.py:r",))), SimpleNamespace()
    columns = columns_of(prompts)
    sampled = rollouts.make_rollouts(config, nothing, tokenizer, functions, Path(), columns=columns)  # pyright: ignore
    for number, prompt in enumerate(prompts):
        sampled.make(sampled.prepare({}, {}), [prompt], [number])
    assert seen == [None, "a"]


def test_parts_of_a_document_keep_it(tokenizer):
    tokens = ids_of(tokenizer, "▁Once", "▁upon", "▁a")
    assert _in_a_line(tokenizer, tokens[1:], tokens[:1]) == " upon a"


def test_a_character_whose_bytes_are_in_both_is_not_guessed(tokenizer):
    first, second = ids_of(tokenizer, "<0xC3>", "<0xA9>")
    assert hf.decode(tokenizer, [first, second]) == "é"
    assert hf.decode(tokenizer, [second], [first]) == "\ufffd"


def test_tokens_on_which_the_tokenizer_panics_are_an_error():
    word = "a" * 60 + "!"
    made = Tokenizer(models.WordLevel({word: 0, "b": 1}, unk_token="b"))
    made.decoder = decoders.Replace(Regex("(a+)+$"), "")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made)
    assert hf.decode(tokenizer, [1]) == "b"
    with pytest.raises(UserError, match="the tokenizer fails to decode 2 tokens: Onig: Regex search error"):
        hf.decode(tokenizer, [0], [1])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"model": ModelOptions(from_scratch=True)}, "trained from random weights without vision.patches_per_row"),
        ({"lora": LoraOptions(enabled=True, target_modules="q_proj")}, "lora.target_modules='q_proj': ask its export"),
        ({"mtp": MtpOptions(weight=0.1)}, "mtp.weight=0.1: ask its export"),
    ],
)
def test_a_run_of_texts_whose_tower_is_not_known_is_not_asked_about_pictures(options, said):
    with pytest.raises(UserError, match=said):
        with_tower(Config(**options), 4)
    assert with_tower(Config(lora=LoraOptions(enabled=True)), 4).vision.patches_per_row == 4


def test_image_bytes_are_left_out_of_the_output():
    assert json.dumps({"image": {"bytes": b"PNG", "path": "a.png"}, "at": Path("b")}, default=as_text) == (
        '{"image": {"bytes": null, "path": "a.png"}, "at": "b"}'
    )
