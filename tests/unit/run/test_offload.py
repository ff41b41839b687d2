"""Training with state offloaded to the host: the same bits, and the state of at most one layer on the device."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import make_batch, tokens
from nightly_rows import nightly, nightly_except
from tiny import random_values, spec

from jaxtune.config.schema import Config, DataOptions, MemoryOptions, ModelOptions, TrainOptions
from jaxtune.errors import UserError
from jaxtune.lora.options import LoraOptions
from jaxtune.optim.options import OptimOptions
from jaxtune.parallel.mesh import make_mesh
from jaxtune.parallel.offload import is_on_host
from jaxtune.parallel.options import MeshOptions
from jaxtune.precision.options import PrecisionOptions
from jaxtune.training.assembly import Program, assemble
from jaxtune.training.memory import need_of
from jaxtune.weights.base import Base

AS_FOR_USERS = True  # tests/conftest.py: compiled by XLA's own choice of code generator
STEPS = 3
SECTIONS: dict[str, Any] = {
    "optim": OptimOptions(max_grad_norm=0.0, no_decay="norm"),
    "precision": PrecisionOptions("fp32"),
}


def program_of(mesh, memory: MemoryOptions, **sections) -> Program:
    """Return full training of a tiny model in bfloat16, so that weights and moments are rounded stochastically."""
    sections = {"precision": PrecisionOptions("bf16", master_dtype="bfloat16"), **sections}
    config = Config(model=ModelOptions(dtype="bfloat16"), data=DataOptions(seq_len=24), memory=memory, **sections)
    return assemble(Base(spec(4)), config, mesh)


def trained_with(mesh, memory: MemoryOptions, **sections):
    """Return the final state and the metrics of each step; a step has two micro-batches."""
    program = program_of(mesh, memory, **sections)
    rows = [make_batch(tokens(2, 24, seed), mesh, [10, 12]) for seed in (1, 2)]
    batch = jax.tree.map(lambda *one: jnp.stack(one), *rows)
    state, step, metrics = jax.jit(program.start)(start(program)), jax.jit(program.step), []
    for leaf, abstract in zip(jax.tree.leaves(state), jax.tree.leaves(program.state), strict=True):
        assert leaf.sharding.memory_kind == abstract.sharding.memory_kind
    frozen = {}
    for _ in range(STEPS):
        state, row = step(state, frozen, batch, jnp.float32(1e-2))
        metrics.append(row)
    return state, metrics


def start(program: Program):
    """Return values of the trained parameters, on the program's shardings."""
    values = random_values(program.model.trained)
    like = program.state.trained
    return {n: jax.device_put(value.astype(like[n].dtype), like[n].sharding) for n, value in values.items()}


@pytest.mark.parametrize("name", nightly_except([], ["adamw", "adamw_8bit", "adafactor"]))
def test_an_optimizer_whose_state_waits_on_the_host_does_the_same(one_device, name):
    optim = OptimOptions(name=name, state_dtype="bfloat16", no_decay="norm", layerwise_lr_decay=0.9)
    expected, _ = trained_with(one_device, MemoryOptions(), optim=optim)
    offloaded, _ = trained_with(one_device, MemoryOptions(offload_optimizer=True), optim=optim)
    moments = jax.tree.leaves(offloaded.optimizer.rules)
    assert moments and all(map(is_on_host, moments))
    jax.tree.map(np.testing.assert_array_equal, offloaded, expected)


@pytest.mark.nightly
def test_matrices_are_orthogonalised_one_after_another(one_device):
    """Products of single matrices have other shapes and round differently."""
    sections = {"optim": OptimOptions(name="muon"), "precision": PrecisionOptions("fp32")}
    expected, _ = trained_with(one_device, MemoryOptions(), **sections)
    offloaded, _ = trained_with(one_device, MemoryOptions(offload_optimizer=True), **sections)
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-5), offloaded.trained, expected.trained)


def test_what_waits_is_counted_as_the_hosts(one_device):
    need = need_of(program_of(one_device, MemoryOptions()), devices=2)
    then = need_of(program_of(one_device, MemoryOptions(offload_optimizer=True)), devices=2)
    moments = jax.tree.leaves(program_of(one_device, MemoryOptions()).state.optimizer.rules)
    assert then.offloaded == 2 * sum(leaf.size * leaf.dtype.itemsize for leaf in moments) > need.offloaded == 0
    assert then.offloaded == 2 * (need.state - then.state)


@pytest.fixture(scope="module")
def on_the_device():
    """Train with everything on the device, and without clipping, which would depend on the gradients' norm."""
    return trained_with(make_mesh(MeshOptions(), jax.devices()[:1]), MemoryOptions("block"), **SECTIONS)


@pytest.mark.parametrize("parts", [nightly(("master",)), nightly(("gradients",)), ("optimizer", "master", "gradients")])
def test_full_training_from_the_hosts_memory_is_the_same(one_device, on_the_device, parts):
    memory = dataclasses.replace(MemoryOptions("block"), **{f"offload_{part}": True for part in parts})
    (offloaded, rows), (expected, metrics) = trained_with(one_device, memory, **SECTIONS), on_the_device
    jax.tree.map(np.testing.assert_array_equal, offloaded, expected)
    assert [one["loss"] for one in rows] == [one["loss"] for one in metrics]
    for one, other in zip(rows, metrics):
        np.testing.assert_allclose(one["grad_norm"], other["grad_norm"], rtol=1e-6)
    layers = [value for name, value in offloaded.trained.items() if name.startswith("stacks")]
    assert layers and all(is_on_host(value) == ("master" in parts) for value in layers)


@pytest.mark.parametrize("part", ["master", "gradients"])
def test_weights_of_layers_that_are_not_trained_are_refused(one_device, part):
    with pytest.raises(UserError, match=f"memory.offload_{part}=True: no weight of a layer is trained"):
        program_of(one_device, MemoryOptions(**{f"offload_{part}": True}), train=TrainOptions(freeze="layers"))


def test_quants_of_a_model_that_has_none_are_refused(one_device):
    with pytest.raises(UserError, match="memory.offload_quants=True: no weight is quantized; set quant.format"):
        program_of(one_device, MemoryOptions(offload_quants=True), lora=LoraOptions(enabled=True))
