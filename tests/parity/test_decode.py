"""Decoding with a cache: the same tokens as transformers, and sampling from the nucleus alone."""

import jax
import jax.numpy as jnp
import pytest
from batches import tokens
from tiny import read, torch_model

from jaxtune.errors import UserError
from jaxtune.models.decode import sample
from jaxtune.run.generation import generate_tokens, stop_tokens, stream_text

NEW = 24


@pytest.mark.parametrize(
    "family",
    [
        "cohere2, shared layer norm",
        "deepseek_v3, latent attention",
        "gemma2, soft caps",
        "gemma3_text, two ropes",
        "gpt_oss, stacked experts",
        "llama, llama3 rope, untied, biases",
        "ministral3, growing queries",
        "olmo3, windows",
        "qwen3, a period of two",
        "qwen3_next, a dense layer",
        "qwen3_5_text, delta nets",
        "starcoder2, layer norm, no gate",
    ],
)
def test_greedy_tokens_equal_transformers(family, one_device, tmp_path):
    reference = torch_model(family, tmp_path)
    import torch

    model, parameters, _ = read(tmp_path, one_device)
    prompt = tokens(1, 37)
    options = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    # Without a mask transformers hides every token 0 of the prompt, as padding.
    everything = torch.ones(prompt.shape, dtype=torch.long)
    expected = reference.generate(torch.tensor(prompt), attention_mask=everything, **options)[0, prompt.shape[1] :]
    expected = expected.tolist()

    def ours(stop):
        with jax.default_matmul_precision("highest"):
            found = generate_tokens(
                model.graph,
                model.spec,
                parameters,
                prompt[0].tolist(),
                max_new_tokens=NEW,
                stop=stop,
                dtype=jnp.dtype("float32"),
                temperature=0.0,
            )
            return list(found)

    assert ours(frozenset()) == expected
    assert ours(frozenset({expected[5]})) == expected[: expected.index(expected[5])]


def test_a_prompt_that_does_not_fit_is_refused(one_device, tmp_path):
    torch_model("qwen3, a period of two", tmp_path)
    model, parameters, _ = read(tmp_path, one_device)
    options = {"max_new_tokens": 300, "stop": frozenset(), "dtype": jnp.dtype("float32")}
    with pytest.raises(UserError, match="256 positions"):
        next(generate_tokens(model.graph, model.spec, parameters, [1, 2], **options))
    with pytest.raises(UserError, match="no tokens"):
        next(generate_tokens(model.graph, model.spec, parameters, [], **options))


def test_only_the_nucleus_is_sampled():
    logits = jnp.log(jnp.array([[0.5, 0.3, 0.15, 0.05]]))
    found = {int(sample(logits, jax.random.key(i), 1.0, 0.7)[0]) for i in range(100)}
    assert found == {0, 1}
    assert int(sample(logits, jax.random.key(0), 0.0, 1.0)[0]) == 0


def test_text_streams_whole_characters():
    class Bytes:
        def decode(self, ids, skip_special_tokens):
            return bytes(ids).decode("utf-8", errors="replace")

    pieces = list(stream_text(Bytes(), iter("naïve €".encode())))
    assert "".join(pieces) == "naïve €" and not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize(("listed", "expected"), [("[0, 7]", {0, 3, 7}), ("0", {0, 3}), ("null", {3})])
def test_every_end_token_stops(tmp_path, listed, expected):
    class Tokenizer:
        eos_token_id = 3

    (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": {listed}}}')
    assert stop_tokens(tmp_path, Tokenizer()) == expected
