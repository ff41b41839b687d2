"""Muon, NorMuon and Adafactor on eight devices equal one, and no device gathers the matrices of a stack."""

import functools
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from runs import call, losses, recipe, write_conversations
from tiny import write_model_folder

from jaxtune.optim.muon import muon, normuon
from jaxtune.optim.orthogonalize import orthogonalize
from jaxtune.optim.rules import Hyperparameters, adafactor
from jaxtune.parallel.mesh import make_mesh
from jaxtune.parallel.options import MeshOptions
from pallas_kernels.aot import COLLECTIVES

MESHES = {
    "fsdp=8": MeshOptions(fsdp=8),
    "fsdp=4 tensor=2": MeshOptions(fsdp=4, tensor=2),
    "data=2 fsdp=4": MeshOptions(data=2, fsdp=4),
}
RULES = {
    "muon": muon(0.95, True, 5, "original", dtype=jnp.float32),
    "normuon": normuon(0.95, 0.95, 5, True, dtype=jnp.float32),
    "adafactor": adafactor(),
}
ROWS, COLUMNS = 128, 136
UPDATES = 3


def sharded(value, mesh):
    """As for q, k, v, gate and up: (heads or mlp, embed)."""
    spec = jax.P(*(None,) * (value.ndim - 2), "tensor", "fsdp")
    return jax.device_put(jnp.float32(value), jax.NamedSharding(mesh, spec))


def train(rule, shape, mesh):
    rng = np.random.default_rng(0)
    parameter, *gradients = (sharded(rng.standard_normal(shape), mesh) for _ in range(1 + UPDATES))
    state = jax.jit(rule.init)(parameter)
    update = jax.jit(
        lambda *arguments: rule.update(*arguments[:3], Hyperparameters(arguments[3], jnp.float32(0.1), 1.0, 0.1))
    )
    for count, gradient in enumerate(gradients):
        after, kept = update(gradient, state, parameter, jnp.int32(count))
        for one, other in zip(jax.tree.leaves((after, kept)), jax.tree.leaves((parameter, state)), strict=True):
            assert one.sharding.is_equivalent_to(other.sharding, one.ndim)
        parameter, state = after, kept
    return np.asarray(parameter), jax.tree.map(np.asarray, state)


@functools.cache
def one_device(name, shape):
    return train(RULES[name], shape, make_mesh(MeshOptions(), jax.devices()[:1]))


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("muon", (3, 24, 32)),
        ("muon", (8, 32, 24)),
        ("muon", (24, 32)),
        ("normuon", (3, 24, 32)),
        ("normuon", (8, 32, 24)),
        ("adafactor", (ROWS, COLUMNS)),
    ],
    ids=str,
)
def test_eight_devices_equal_one(name, shape, mesh):
    expected, expected_state = one_device(name, shape)
    found, state = train(RULES[name], shape, make_mesh(MESHES[mesh]))
    assert np.abs(found - expected).max() <= 2e-6
    for key, value in expected_state.items():
        assert np.abs(state[key] - value).max() <= 2e-6 * max(1.0, np.abs(value).max()), key


def collectives(function, *arguments) -> dict[str, int]:
    """Kind -> number of result elements on a device."""
    found = {}
    kinds = "|".join(COLLECTIVES)
    hlo = jax.jit(function).lower(*arguments).compile().as_text() or ""
    for shape, kind in re.findall(rf"^ *(?:ROOT )?%\S+ = (.+?) ({kinds})(?:-start)?\(", hlo, re.MULTILINE):
        arrays = re.findall(r"\w+\[([\d,]*)\]", shape)
        elements = sum(int(np.prod([int(size) for size in array.split(",") if size])) for array in arrays)
        found[kind] = found.get(kind, 0) + elements
    return found


@pytest.mark.parametrize(("mesh", "exchanges"), [("fsdp=8", 2), ("fsdp=4 tensor=2", 4)])
@pytest.mark.parametrize("layers", [3, 8])
def test_a_device_gets_its_share_of_a_stack_and_no_more(layers, mesh, exchanges):
    """For each mesh axis, one all-to-all there and one back, of the device's own part."""
    stack = sharded(np.ones((layers, 24, 32)), make_mesh(MESHES[mesh]))
    assert collectives(orthogonalize, stack) == {"all-to-all": exchanges * 8 * 24 * 32 // 8}


def test_replicas_share_the_work():
    """Each half of the data axis orthogonalises its half of the layers; an all-gather brings the other half."""
    stack = sharded(np.ones((8, 24, 32)), make_mesh(MESHES["data=2 fsdp=4"]))
    share = 8 * 24 * 32 // 4
    assert collectives(orthogonalize, stack) == {"all-to-all": 2 * share // 2, "all-gather": share}


@pytest.mark.parametrize("layers", [4, 12])
def test_sharded_layers_stay_on_the_devices_of_their_shard(layers):
    """Two experts or more, padded to 4 on the 4 devices of a shard, are exchanged over fsdp only."""
    mesh = make_mesh(MeshOptions(fsdp=4, expert=2))
    spec = jax.P("expert", None, "fsdp")
    stack = np.random.default_rng(0).standard_normal((layers, 24, 32)).astype(np.float32)
    placed = jax.device_put(stack, jax.NamedSharding(mesh, spec))
    padded = 2 * 4 * -(-layers // 8)
    assert collectives(orthogonalize, placed) == {"all-to-all": 2 * padded * 24 * 32 // 8}
    found = jax.jit(lambda x: orthogonalize(x, dtype=jnp.float32))(placed)
    assert jax.typeof(found).sharding.spec == spec
    with jax.set_mesh(make_mesh(MeshOptions(), jax.devices()[:1])):
        expected = orthogonalize(jnp.asarray(stack), dtype=jnp.float32)
    np.testing.assert_allclose(found, expected, atol=2e-6)


def test_a_run_whose_experts_are_divided_resumes_in_equal_bits(tmp_path):
    mixture = dict(moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2, norm_topk_prob=True)
    write_model_folder(tmp_path / "model", "Qwen3Moe", **mixture)
    write_conversations(tmp_path / "chat.jsonl")
    settings = ("mesh.expert=2", "mesh.fsdp=1", "optim.name=muon", "train.max_steps=6", "ckpt.save_steps=3")
    command = ("jaxtune.train", f"--config={recipe(tmp_path)}", *(f"--config.{setting}" for setting in settings))
    call(*command, devices=2)
    run = next((tmp_path / "runs").iterdir())
    whole = losses(run)
    shutil.rmtree(run / "checkpoints" / "6")
    assert "resumed from step 3" in call(*command, devices=2)
    assert losses(run) == whole
