"""Decoding with a cache: the same tokens as transformers, and the same candidate tokens."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import tokens
from nightly_rows import nightly_except
from tiny import read_model, save_torch_model

from jaxtune.errors import UserError
from jaxtune.inference import decode
from jaxtune.inference.decode import NextTokens, Sampling, begin, choose, mask_logits
from jaxtune.inference.generation import (
    collect_completions,
    decoding_weights,
    make_generate,
    make_stop_test,
    stop_tokens,
    stream_text,
    take_until,
)
from jaxtune.models.forward_options import ForwardOptions
from jaxtune.precision.options import PrecisionOptions

NEW = 24


# One family for each kind of layer and of cache.
OF_EACH_KIND = (
    "deepseek_v3, latent attention",
    "gemma3_text, two ropes",
    "gemma4_text, layer embeddings, shared keys and values",
    "gpt_oss, stacked experts",
    "granitemoehybrid, Mamba-2, experts",
    "lfm2, biases",
    "llama, llama3 rope, untied, biases",
    "qwen3_5_text, delta nets",
)


@pytest.mark.parametrize(
    "family",
    nightly_except(
        OF_EACH_KIND,
        [
            "afmoe, windows, gates, a dense layer",
            "cohere2, shared layer norm",
            "cohere2_moe, a dense layer, a shared expert",
            "deepseek_v3, latent attention",
            "gemma2, soft caps",
            "gemma3_text, two ropes",
            "falcon_h1, attention beside Mamba-2",
            "gemma4_text, experts, keys as values",
            "gemma4_text, layer embeddings, shared keys and values",
            "gpt_oss, stacked experts",
            "granitemoehybrid, Mamba-2, experts",
            "lfm2, biases",
            "llama, llama3 rope, untied, biases",
            "ministral3, growing queries",
            "mistral4, growing queries",
            "nemotron_h, one part a layer, biases",
            "olmo3, windows",
            "olmo_hybrid, delta nets and attention without rope",
            "qwen3, a period of two",
            "qwen3_next, a dense layer",
            "qwen3_5_text, delta nets",
            "starcoder2, layer norm, no gate",
        ],
    ),
)
def test_greedy_tokens_equal_transformers(family, one_device, tmp_path):
    reference = save_torch_model(family, tmp_path)
    import torch

    model, parameters, _ = read_model(tmp_path, one_device)
    prompts = [tokens(1, length, seed=length)[0].tolist() for length in (37, 2, 70)]
    options = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}

    def theirs(prompt):
        # Without a mask, transformers treats every token 0 of the prompt as padding.
        everything = torch.ones((1, len(prompt)), dtype=torch.long)
        return reference.generate(torch.tensor([prompt]), attention_mask=everything, **options)[0].tolist()

    expected = [theirs(prompt)[len(prompt) :] for prompt in prompts]
    sampling = {"sampling": Sampling(temperature=0.0), "dtype": jnp.dtype("float32")}
    generate = make_generate(model.graph, model.spec, max_new_tokens=NEW, **sampling)
    with jax.default_matmul_precision("highest"):
        found = np.stack([step.tokens for step in generate(parameters, prompts)], axis=1)
        assert found.tolist() == expected
        alone = take_until(generate(parameters, prompts[:1]), frozenset({expected[0][5]}))
        assert list(alone) == expected[0][: expected[0].index(expected[0][5])]


def test_a_prompt_that_does_not_fit_is_refused(one_device, tmp_path):
    save_torch_model("qwen3, a period of two", tmp_path)
    model, parameters, _ = read_model(tmp_path, one_device)
    generate = make_generate(model.graph, model.spec, max_new_tokens=300, dtype=jnp.dtype("float32"))
    with pytest.raises(UserError, match="256 positions"):
        next(generate(parameters, [[1], [1, 2]]))
    with pytest.raises(UserError, match="no tokens"):
        next(generate(parameters, [[1], []]))


def test_what_is_sampled_does_not_depend_on_other_prompts(one_device, tmp_path):
    save_torch_model("qwen3, a period of two", tmp_path)
    model, parameters, _ = read_model(tmp_path, one_device)
    generate = make_generate(model.graph, model.spec, max_new_tokens=8, dtype=jnp.dtype("float32"), seed=3)
    prompts = [tokens(1, length, seed=length)[0].tolist() for length in (5, 9)]
    together = np.stack([step.tokens for step in generate(parameters, [*prompts, prompts[0]], [7, 8, 9])], axis=1)
    alone = np.stack([step.tokens for step in generate(parameters, prompts[:1], [7])], axis=1)
    assert together[0].tolist() == alone[0].tolist()
    assert together[0].tolist() != together[2].tolist()


def test_weights_that_are_cast_once_give_the_same_tokens(one_device, tmp_path):
    """Layers of precision.exclude compute in float32, so their weights keep it."""
    save_torch_model("qwen3_moe, a dense layer, router loss", tmp_path)
    precision = PrecisionOptions("bf16", exclude="q_proj")
    model, parameters, _ = read_model(tmp_path, one_device, precision=precision)
    bfloat16 = jnp.dtype("bfloat16")
    generate = make_generate(model.graph, model.spec, max_new_tokens=NEW, dtype=bfloat16)
    cast = decoding_weights(model, parameters, bfloat16)
    linears = [name for name, parameter in model.parameters.items() if parameter.kind == "linear"]
    float32 = [name for name in linears if cast[name].dtype == jnp.float32]
    assert float32 and float32 == [name for name in linears if name.endswith("attention.q.weight")]
    assert all(cast[name].dtype == bfloat16 for name in linears if name not in float32)
    waiting = {name: dataclasses.replace(parameter, on_host=True) for name, parameter in model.parameters.items()}
    assert decoding_weights(dataclasses.replace(model, parameters=waiting), parameters, bfloat16) == parameters
    steps = [generate(one, [[5, 6, 7]]) for one in (parameters, cast)]
    for ours, cast in zip(*steps, strict=True):
        assert ours.tokens == cast.tokens and ours.log_probs[0] == cast.log_probs[0]


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0.7),
        Sampling(top_k=5),
        Sampling(top_k=1000),
        Sampling(top_p=0.6),
        Sampling(temperature=1.5, top_k=20, top_p=0.9, min_p=0.02),
        Sampling(min_p=0.3),
    ],
    ids=str,
)
def test_tokens_to_choose_from_equal_transformers(sampling):
    import torch
    from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = 3 * np.random.default_rng(0).standard_normal((4, 60)).astype(np.float32)
    warpers = [TemperatureLogitsWarper(sampling.temperature)]
    warpers += [] if sampling.top_k is None else [TopKLogitsWarper(sampling.top_k)]
    warpers += [TopPLogitsWarper(sampling.top_p)] if sampling.top_p < 1 else []
    warpers += [MinPLogitsWarper(sampling.min_p)] if sampling.min_p else []
    expected = torch.tensor(logits)
    for warper in warpers:
        expected = warper(torch.zeros((4, 1), dtype=torch.long), expected)
    np.testing.assert_allclose(mask_logits(jnp.array(logits) / sampling.temperature, sampling), expected, rtol=1e-6)


def test_penalty_of_repetition_equals_transformers(one_device, tmp_path):
    reference = save_torch_model("llama, llama3 rope, untied, biases", tmp_path)
    import torch

    model, parameters, _ = read_model(tmp_path, one_device)
    prompts = [tokens(1, length, seed=length)[0].tolist() for length in (20, 12)]
    options = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = []
    for prompt in prompts:
        everything = torch.ones((1, len(prompt)), dtype=torch.long)
        options |= {"attention_mask": everything, "repetition_penalty": 1.7}
        expected.append(reference.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist())
    sampling = Sampling(temperature=0.0, repetition_penalty=1.7)
    how = {"max_new_tokens": NEW, "dtype": jnp.dtype("float32"), "sampling": sampling}
    generate = make_generate(model.graph, model.spec, **how)
    with jax.default_matmul_precision("highest"):
        assert np.stack([step.tokens for step in generate(parameters, prompts)], axis=1).tolist() == expected


def test_padding_is_no_token_that_occurs(monkeypatch):
    """Prompts are padded with token 0 on the left, which no repetition penalty may count."""
    monkeypatch.setattr(decode, "empty_cache", lambda *_: None)
    monkeypatch.setattr(decode, "advance", lambda decoder, tokens, decoding, *_: decoding)
    decoder: Any = SimpleNamespace(spec=SimpleNamespace(vocabulary=6))
    arguments = jnp.array([[0, 3, 3, 5], [1, 0, 2, 4]]), jnp.array([1, 0]), None
    found: Any = begin(decoder, *arguments, Sampling(repetition_penalty=1.1), 8, ForwardOptions(jnp.dtype("float32")))
    assert [np.flatnonzero(row).tolist() for row in found.seen] == [[3, 5], [0, 1, 2, 4]]


def test_only_what_is_kept_is_sampled():
    logits = jnp.log(jnp.array([[0.5, 0.3, 0.15, 0.05]]))
    keys = jax.random.split(jax.random.key(0), 100)
    found = choose(jnp.repeat(logits, 100, 0), keys, None, Sampling(top_p=0.7))
    assert set(found.tokens.tolist()) == {0, 1}
    # Before any token is left out, as training computes them.
    np.testing.assert_allclose(found.log_probs, logits[0, found.tokens], rtol=1e-6)
    np.testing.assert_allclose(found.entropies, -np.sum(np.exp(logits[0]) * logits[0]), rtol=1e-6)


def test_rows_end_one_by_one():
    class Bytes:
        def decode(self, ids, skip_special_tokens):
            return bytes(ids).decode("utf-8", errors="replace")

    made = [
        NextTokens(np.array(row), -np.array(row) / 2, np.array(row) / 4)
        for row in zip(b"ab\0cd", b"xy STO", b"naive ", "2😀".encode())
    ]
    found = collect_completions(made, 4, make_stop_test(frozenset({0}), ["TO", "y S", "😀"], Bytes()), scores=True)
    texts = [(b"ab\0", True), (b"xy S", True), (b"naive", False), ("2😀".encode(), True)]
    assert [(bytes(one.tokens), one.finished) for one in found] == texts
    assert all([-2 * value for value in one.log_probs] == one.tokens for one in found)
    assert all([4 * value for value in one.entropies] == one.tokens for one in found)


def test_scores_and_experts_are_found_where_a_row_is_when_others_have_left():
    """`rows` says which prompt each row of a step has; the last row of the first step is padding."""

    def step(tokens: list[int], rows: list[int], read: int) -> NextTokens:
        of_rows = np.array(rows, np.float32)
        experts = np.broadcast_to(np.array(rows, np.int16)[:, None, None, None], (len(rows), read, 1, 1))
        return NextTokens(np.array(tokens), of_rows, 2 * of_rows, experts, np.array(rows))

    steps = [step([5, 0, 6], [0, 1, 2, 3], 4), step([7, 0, 0], [0, 2], 1), step([8, 0, 0], [0], 1)]
    going = {0, 1, 2}
    found = collect_completions(
        steps, 3, lambda tokens: tokens[-1] in (0, 8), scores=True, lengths=[4, 2, 3], going=going
    )
    assert [one.tokens for one in found] == [[5, 7, 8], [0], [6, 0]] and not going
    assert [list(one.log_probs) for one in found] == [[0, 0, 0], [1], [2, 2]]
    assert [list(one.entropies) for one in found] == [[0, 0, 0], [2], [4, 4]]
    assert [one.routed_experts.ravel().tolist() for one in found] == [[0] * 6, [1] * 2, [2] * 4]


def test_text_streams_whole_characters():
    class Bytes:
        def decode(self, ids, skip_special_tokens):
            return bytes(ids).decode("utf-8", errors="replace")

    pieces = list(stream_text(Bytes(), iter("naïve €".encode())))
    assert "".join(pieces) == "naïve €" and not any("\ufffd" in piece for piece in pieces)


def test_text_streams_up_to_a_string_that_ends_it():
    class Bytes:
        def decode(self, ids, skip_special_tokens):
            return bytes(ids).decode("utf-8", errors="replace")

    pieces = list(stream_text(Bytes(), iter(b"a STO b STOP c"), ["STOP", "zz"]))
    assert "".join(pieces) == "a STO b "
    assert "".join(stream_text(Bytes(), iter(b"a ST"), ["STOP"])) == "a ST"


@pytest.mark.parametrize(("listed", "expected"), [("[0, 7]", {0, 3, 7}), ("0", {0, 3}), ("null", {3})])
def test_every_end_token_stops(tmp_path, listed, expected):
    class Tokenizer:
        eos_token_id = 3

    (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": {listed}}}')
    assert stop_tokens(tmp_path, Tokenizer()) == expected
