"""Completions of the run's own devices: the probabilities that they count with, and rows that leave the batch."""

from contextlib import ExitStack
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nightly_rows import nightly
from tiny import VOCABULARY, random_values, spec

from jaxtune.config.schema import Config, DataOptions, LogOptions, ModelOptions, RolloutOptions, TrainOptions
from jaxtune.data.formats.prompts import Prompt
from jaxtune.data.rows.prompt_feed import PromptBatch
from jaxtune.inference import generation
from jaxtune.inference.decode import Sampling, choose
from jaxtune.objectives.options import GrpoOptions
from jaxtune.optim.options import OptimOptions
from jaxtune.parallel.mesh import make_mesh
from jaxtune.parallel.options import MeshOptions
from jaxtune.precision.options import PrecisionOptions
from jaxtune.rollout import completers, rollouts
from jaxtune.rollout.groups import Rollout
from jaxtune.training.assembly import Program, assemble
from jaxtune.weights.base import Base

PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5], [11], [12, 13]] * 4


def config_of(precision: str = "fp32", rows: int = 16, **rollout: Any) -> Config:
    options = {"group_size": 4, "max_new_tokens": 12} | rollout
    return Config(
        model=ModelOptions(dtype="float32"),
        data=DataOptions(seq_len=32),
        train=TrainOptions(micro_batch_size=rows),
        optim=OptimOptions("sgd", learning_rate=1.0),
        precision=PrecisionOptions(precision),
        log=LogOptions(jsonl=False),
        grpo=GrpoOptions(iterations=2, clip_low=0.0, clip_high=0.0),
        rollout=RolloutOptions(("r.py:r",), **options),
    )


def parts_of(program: Program) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return values of the trained and of the frozen parameters, by which some tokens are likelier than others."""
    values = random_values(program.model.parameters)
    values = {name: value if "norm" in name else value * 10 for name, value in values.items()}
    return tuple({name: values[name] for name in part} for part in (program.model.trained, program.model.frozen))  # pyright: ignore


@pytest.mark.parametrize(("precision", "largest"), [("fp32", 1e-5), nightly("bf16", 0.1)])
def test_the_update_counts_with_probabilities_of_its_own_so_that_its_ratio_is_one(
    precision, largest, monkeypatch, tmp_path, one_device
):
    """Decoding rounds in another way than training, which computes whole rows.

    So the old probabilities of several updates are computed by training's forward pass. At the first update no ratio is
    above or below 1 by a single bit: with no clipping range, it would be clipped. All are of the sampling temperature.
    """
    config = config_of(precision, correction="token_truncate", temperature=0.8)
    program = assemble(Base(spec(2)), config, one_device)
    monkeypatch.setattr(completers, "stops_of", lambda *_: frozenset({3}))
    source, update, updates = completers.complete_on_devices(config, program.model, None), jax.jit(program.step), []

    def make(weights: Any, prompts: list[Prompt], numbers: Any) -> Rollout:
        completions = source.complete(weights, [prompt.tokens for prompt in prompts], numbers)
        rewards = np.arange(len(prompts), dtype=float)
        return Rollout(prompts, completions, [""] * len(prompts), {"r": rewards}, rewards)

    def train_step(*arguments: Any) -> Any:
        state, metrics = update(*arguments)
        updates.append(metrics)
        return state, metrics

    sampled = rollouts.Rollouts(source.prepare, make)
    step = rollouts.make_rollout_step(config, program, sampled, train_step, tmp_path, ExitStack())
    trained, frozen = parts_of(program)
    prompts = [Prompt("", tokens, {}) for tokens in PROMPTS[:4]]
    _, metrics = step(program.start(trained), frozen, PromptBatch(prompts, 0), jnp.float32(1.0))
    first, second = updates
    assert first["clip_ratio/low"] == first["clip_ratio/high"] == 0
    assert second["clip_ratio/low"] + second["clip_ratio/high"] > 0.1
    assert 0 < metrics["sampling/sampling_logp_difference/max"] < largest
    assert metrics["sampling/importance_sampling_ratio/mean"] == pytest.approx(1, abs=largest)


@pytest.mark.parametrize(("mesh", "devices"), [(MeshOptions(fsdp=2, tensor=2), 4), nightly(MeshOptions(), 1)])
def test_completions_that_ended_leave_the_batch_and_the_others_stay_the_same(mesh, devices, monkeypatch):
    """Each device continues with half of its rows, or a quarter, as soon as these are enough."""
    made = make_mesh(mesh, jax.devices()[:devices])
    config = config_of(rows=16 // made.shape["fsdp"], repetition_penalty=1.1)
    monkeypatch.setattr(completers, "stops_of", lambda *_: frozenset(range(0, VOCABULARY, 5)))
    program = assemble(Base(spec(2)), config, made)
    trained, frozen = parts_of(program)
    source, kept, keep_rows = completers.complete_on_devices(config, program.model, None), [], generation.keep_rows
    weights = source.prepare(trained, frozen)
    everything = source.complete(weights, PROMPTS, range(16))  # as few rows do not leave
    monkeypatch.setattr(generation, "FEWEST_ROWS", 1)
    monkeypatch.setattr(generation, "keep_rows", lambda *asked: kept.append(len(asked[2])) or keep_rows(*asked))
    found = source.complete(weights, PROMPTS, range(16))
    assert kept and all(number % made.shape["fsdp"] == 0 for number in kept) and min(kept) < 16
    assert len({len(one.tokens) for one in found}) > 3
    assert [one[:2] for one in found] == [one[:2] for one in everything]
    for one, other in zip(found, everything):
        np.testing.assert_allclose(one.log_probs, other.log_probs, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(one.entropies, other.entropies, rtol=1e-5, atol=1e-6)


def test_an_image_token_is_never_chosen_and_counts_in_the_probabilities_of_the_others():
    """No image belongs to it. The update's probabilities, in whole rows, are of all tokens too."""
    logits = jnp.array([[1.0, 2.0, 5.0, 0.0]])
    keys = jax.random.split(jax.random.key(0), 1)
    for temperature in (0.0, 1.0):
        chosen = choose(logits, keys, None, Sampling(temperature=temperature, top_k=2), never=2)
        assert chosen.tokens[0] in (0, 1)
        expected = jax.nn.log_softmax(logits)[0, chosen.tokens[0]]
        np.testing.assert_allclose(chosen.log_probs[0], expected, rtol=1e-6)


def test_every_device_keeps_as_many_rows_as_the_one_that_needs_most(monkeypatch):
    monkeypatch.setattr(generation, "FEWEST_ROWS", 1)
    rows = np.array([5, 9, 2, 7, 8, 1, 0, 4])

    def kept(needed: set[int], devices: int) -> Any:
        places = generation.rows_to_keep(rows, needed, devices)
        return None if places is None else places.tolist()

    assert kept({9, 7, 8, 1}, 2) == [1, 3, 4, 5]
    assert kept({5, 9, 2}, 2) is None, "the first device needs three of its four"
    assert kept({7, 4}, 2) == [3, 7]
    assert kept({7}, 1) == [3]
    monkeypatch.setattr(generation, "FEWEST_ROWS", 2)
    assert kept({7}, 1) == [0, 3], "a row that ended fills the place"
