"""Dropout of the model itself in whole steps: its rates, and the same bits on any mesh."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import spec

from jaxtune.config.checks import check
from jaxtune.config.schema import Config, DataOptions, Dataset, MemoryOptions, ModelOptions, TrainOptions
from jaxtune.models.forward_options import ForwardOptions
from jaxtune.models.options import AttentionOptions
from jaxtune.models.parameters import randomize
from jaxtune.optim.options import OptimOptions
from jaxtune.parallel.layout import RULES, Rules
from jaxtune.parallel.mesh import make_mesh
from jaxtune.parallel.options import MeshOptions
from jaxtune.parallel.random import Noise
from jaxtune.precision.options import PrecisionOptions
from jaxtune.training.assembly import assemble
from jaxtune.weights.base import Base

ROWS, TOKENS = 2, 16
DROPPING: dict[str, Any] = {"hidden_dropout": 0.3, "attention_dropout": 0.3, "dropout_warmup_steps": 2}


def losses(
    mesh: MeshOptions, devices: int, memory: MemoryOptions = MemoryOptions("block"), **train: Any
) -> list[float]:
    """Return the losses of steps that change almost nothing, on the same rows."""
    made = make_mesh(mesh, jax.devices()[:devices])
    config = Config(
        data=DataOptions(seq_len=TOKENS),
        train=TrainOptions(micro_batch_size=ROWS, grad_accum_steps=2, **train),
        optim=OptimOptions(learning_rate=1e-9, schedule="constant"),
        precision=PrecisionOptions("fp32"),
        memory=memory,
    )
    program = assemble(Base(spec(2)), config, made)
    tokens = np.random.default_rng(0).integers(0, 256, (2, ROWS, TOKENS))
    columns = {
        "tokens": tokens,
        "targets": np.roll(tokens, -1, 2),
        "positions": np.broadcast_to(np.arange(TOKENS), tokens.shape),
        "segment_ids": np.ones_like(tokens),
        "key_start": np.zeros_like(tokens),
        "loss_weight": np.ones(tokens.shape),
        "row": np.arange(2 * ROWS).reshape(2, ROWS),
    }
    batch = {n: jax.device_put(np.asarray(columns[n], x.dtype), x.sharding) for n, x in program.batch.items()}
    state, step, values = jax.jit(program.start)(randomize(program.model.trained, 0)), jax.jit(program.step), []
    for _ in range(2):
        state, metrics = step(state, {}, batch, np.float32(1e-9))
        values.append(float(metrics["loss"]))
    jax.set_mesh(None)
    RULES.set_global(Rules())
    return values


@pytest.mark.nightly
def test_dropout_rises_and_is_the_same_on_a_mesh_and_without_recomputation():
    plain, dropped = losses(MeshOptions(fsdp=1), 1), losses(MeshOptions(fsdp=1), 1, **DROPPING)
    assert dropped[0] == pytest.approx(plain[0], rel=1e-6) and dropped[1] != pytest.approx(plain[1], rel=1e-4)
    assert losses(MeshOptions(fsdp=1, stage=2, tensor=2), 4, MemoryOptions("none"), **DROPPING) == pytest.approx(
        dropped, rel=1e-6
    )


def test_dropout_by_depth_begins_at_0_in_the_first_layer():
    """Rates equal ERNIE's LayerwiseDropoutCallback: the rate of the step times layer / layers."""
    call = ForwardOptions(jnp.float32, Noise(jax.random.key(0), jnp.arange(2), share=jnp.float32(0.5)))
    rates = [float(call._replace(dropout_layers=4).layer(jnp.int32(i)).noise.rate(0.4)) for i in range(4)]
    assert rates == pytest.approx([0, 0.05, 0.1, 0.15])
    assert float(call.layer(jnp.int32(3)).noise.rate(0.4)) == pytest.approx(0.2)


@pytest.mark.nightly
def test_dropout_by_depth_is_the_same_on_a_mesh():
    by_depth = {**DROPPING, "dropout_warmup_steps": 0, "dropout_by_depth": True}
    dropped = losses(MeshOptions(fsdp=1), 1, **by_depth)
    same = losses(MeshOptions(fsdp=1, stage=2, tensor=2), 4, MemoryOptions("none"), **by_depth)
    assert dropped == pytest.approx(same, rel=1e-6)
    assert dropped[0] != pytest.approx(losses(MeshOptions(fsdp=1), 1, **{**by_depth, "dropout_by_depth": False})[0])


@pytest.mark.parametrize(("backend", "refused"), [("auto", False), ("xla", False), ("triton", True)])
def test_dropped_probabilities_and_a_kernel_exclude_each_other(backend, refused):
    config = Config(
        model=ModelOptions(path="a"),
        data=DataOptions(datasets=(Dataset(path="b"),)),
        train=TrainOptions(attention_dropout=0.1),
        attention=AttentionOptions(backend),
    )
    problems = [problem.text for problem in check(config)]
    assert any("train.attention_dropout = 0.1: no kernel supports it" in text for text in problems) == refused
