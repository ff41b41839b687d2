"""Losses that balance experts, on padded rows, against numpy; they are float32 whatever activations are."""

import dataclasses
import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import make_batch, tokens
from flax import nnx
from tiny import VOCABULARY, layer, random_values, spec, transformers_config

from jaxtune.config.schema import Config, DataOptions, MemoryOptions, ModelOptions, TrainOptions
from jaxtune.models.decoder import bind
from jaxtune.models.families import read_spec
from jaxtune.models.forward_options import ForwardOptions
from jaxtune.models.head.score import Scores
from jaxtune.models.options import ExpertsOptions as Options
from jaxtune.models.structure.layer_spec import Experts
from jaxtune.objectives.balanced import sequence_loss, z_loss
from jaxtune.parallel.layout import P, by_token
from jaxtune.precision.options import PrecisionOptions
from jaxtune.training.assembly import assemble
from jaxtune.weights.base import Base
from jaxtune.weights.model import declare_model

ROWS, POSITIONS, COUNT, ACTIVE = 3, 20, 6, 2
SOFTMAX = Experts(16, COUNT, ACTIVE, normalized=True, float32=True)
SIGMOID = dataclasses.replace(SOFTMAX, scores="sigmoid", corrected=True)
TOKENS = (20, 13, 5)  # in each row


def of_family(experts: Experts, layers: int = 2):
    sparse = dataclasses.replace(layer(), feed_forward=experts)
    return spec((sparse,) * layers, family="glm4_moe" if experts.corrected else "qwen3_moe")


@pytest.mark.parametrize("experts", [SOFTMAX, SIGMOID], ids=["softmax", "sigmoid, corrected"])
def test_a_row_balances_alone_and_padding_does_not_count(one_device, experts):
    config = Config(ModelOptions(dtype="float32"), DataOptions(seq_len=POSITIONS), precision=PrecisionOptions("fp32"))
    model = declare_model(Base(of_family(experts)), config, one_device)
    random = np.random.default_rng(0)
    values = {name: 10 * value for name, value in random_values(model.parameters).items()}
    x = random.normal(size=(2, ROWS, POSITIONS, 16)).astype(jnp.bfloat16)
    real = np.arange(POSITIONS) < np.array(TOKENS)[:, None]
    graph, stacked = nnx.split(bind(model.graph, values).stacks[0].blocks[0].mlp)
    x, valid = (
        jax.device_put(a, jax.NamedSharding(one_device, p)) for a, p in ((x, P(None, *by_token())), (real, by_token()))
    )

    @jax.jit
    @partial(jax.vmap, in_axes=(0, 0, None))
    def emitted(stacked, x, valid):
        return nnx.merge(graph, stacked)(x, ForwardOptions(jnp.dtype("bfloat16"), experts="dense"), valid, x)[1]

    scores = Scores(jnp.zeros(()), jnp.zeros(()), emitted(stacked, x, valid))

    balance, z = np.zeros((2, ROWS)), []
    for number in range(2):
        router = {name.rsplit(".", 1)[1]: np.asarray(v)[number] for name, v in values.items() if "router" in name}
        for row, count in enumerate(TOKENS):
            logits = np.asarray(x[number, row, :count], np.float32) @ router["weight"].T
            s = 1 / (1 + np.exp(-logits)) if experts.corrected else np.exp(logits)
            chosen = np.argsort(-(s + router["correction"] if experts.corrected else s), axis=-1)[:, :ACTIVE]
            f = np.bincount(chosen.ravel(), minlength=COUNT) * COUNT / (ACTIVE * count)
            balance[number, row] = np.sum(f * (s / s.sum(-1, keepdims=True)).mean(0))
            z.extend(np.log(np.exp(logits).sum(-1)) ** 2)
    expected = np.average(balance.mean(0), weights=TOKENS)
    assert abs(float(sequence_loss(scores)) - expected) <= 1e-5 * expected
    assert abs(float(z_loss(scores)) - np.mean(z)) <= 1e-5 * np.mean(z)


def test_mixtures_of_texts_and_of_images_are_balanced_apart(one_device):
    """Each counts its own tokens; a row without an image counts for the texts' only."""
    written = json.loads(transformers_config("ernie4_5_vl_moe, experts of images").to_json_string(use_diff=False))
    config = Config(ModelOptions(dtype="float32"), DataOptions(seq_len=POSITIONS), precision=PrecisionOptions("fp32"))
    model = declare_model(Base(read_spec(written, vision=True)), config, one_device)
    values = {name: 10 * value for name, value in random_values(model.parameters).items()}
    graph, stacked = nnx.split(bind(model.graph, values).stacks[1].blocks[0].mlp)
    random = np.random.default_rng(0)
    x, real = random.normal(size=(ROWS, POSITIONS, 64)), np.arange(POSITIONS) < np.array(TOKENS)[:, None]
    seen = random.random((ROWS, POSITIONS)) < np.array([0.4, 0.7, 0])[:, None]
    layouts = by_token(None), by_token(), by_token()
    x, valid, visual = (
        jax.device_put(array, jax.NamedSharding(one_device, layout))
        for array, layout in zip((x.astype(np.float32), real, seen), layouts)
    )

    @jax.jit
    def emitted(stacked, x, valid, visual):
        layer = nnx.merge(graph, jax.tree.map(lambda stack: stack[0], stacked))
        return layer(x, ForwardOptions(jnp.dtype("float32")), valid, x, None, visual)[1]

    both, balance, tokens = emitted(stacked, x, valid, visual), [], []
    for number, (prefix, of) in enumerate((("router", real & ~seen), ("vision_router", real & seen))):
        names = ("weight", "correction")
        router = {name: np.asarray(values[f"stacks.1.blocks.0.mlp.{prefix}.{name}"])[0] for name in names}
        scores = jax.nn.softmax(np.asarray(x) @ router["weight"].T, axis=-1)
        chosen = np.argsort(-(scores + router["correction"]), axis=-1)[..., :2]
        choices = np.stack([np.bincount(row[counted].ravel(), minlength=4) for row, counted in zip(chosen, of)])
        np.testing.assert_array_equal(both["router_choices"][number], choices)
        tokens.append(of.sum(-1))
        mean = (scores * of[..., None]).sum(1) / np.maximum(tokens[-1], 1)[:, None]
        balance.append((4 * choices / np.maximum(2 * tokens[-1], 1)[:, None] * mean).sum(-1))
    found = sequence_loss(Scores(jnp.zeros(()), jnp.zeros(()), {name: value[None] for name, value in both.items()}))
    assert tokens[1][2] == 0 and tokens[1].sum() > 9
    assert float(found) == pytest.approx(np.average(balance, weights=tokens), rel=1e-5)


def gradients_of(mesh, micro_batches: int, **options):
    """Return (loss, metrics, router gradient) of two rows of unlike lengths, in one micro-batch or two."""
    config = Config(
        ModelOptions(dtype="float32"),
        DataOptions(seq_len=16),
        train=TrainOptions(grad_accum_steps=micro_batches, micro_batch_size=2 // micro_batches),
        memory=MemoryOptions("none"),
        precision=PrecisionOptions("fp32"),
        experts=Options("dense", **options),
    )
    program = assemble(Base(of_family(SOFTMAX, layers=1)), config, mesh)
    batch, valid = make_batch(tokens(2, 16), mesh), np.arange(16) < np.array([[15], [5]])
    batch |= {name: batch[name] * valid for name in ("segment_ids", "loss_weight")}
    batch = {
        name: jax.device_put(np.asarray(batch[name]).reshape(leaf.shape), leaf.sharding)
        for name, leaf in program.batch.items()
    }
    result = jax.jit(program.gradients)(random_values(program.model.trained), {}, batch, jnp.zeros((), jnp.int32))
    metrics = {name: value / weight for name, (value, weight) in result.sums.metrics.items()}
    assert result.sums.weight == 20
    return result.sums.loss / 20, metrics, np.asarray(result.gradients["stacks.0.blocks.0.mlp.router.weight"])


def test_losses_are_added_with_their_weights_and_a_row_may_be_in_any_micro_batch(one_device):
    options = {"router_loss": 0.5, "router_loss_over": "sequence", "router_z_loss": 0.25}
    loss, metrics, gradient = gradients_of(one_device, 1, **options)
    added = 0.5 * metrics["router_loss"] + 0.25 * metrics["router_z_loss"]
    assert abs(loss - np.log(VOCABULARY) - added) <= 0.05 < added  # every token is about equally likely
    loss_in_two, metrics_in_two, gradient_in_two = gradients_of(one_device, 2, **options)
    assert abs(loss - loss_in_two) <= 1e-6
    assert all(abs(metrics[name] - metrics_in_two[name]) <= 1e-6 for name in ("router_loss", "router_z_loss"))
    assert np.abs(gradient - gradient_in_two).max() <= 1e-5 * np.abs(gradient).max()
