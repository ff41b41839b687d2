"""Muon, NorMuon and Adafactor on eight devices equal one, and no device gathers the matrices of a stack."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

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


def test_layers_that_are_sharded_are_refused():
    mesh = make_mesh(MESHES["fsdp=8"])
    stack = jax.device_put(jnp.ones((8, 4, 4)), jax.NamedSharding(mesh, jax.P("fsdp")))
    with pytest.raises(ValueError, match="layers of a stack must not be sharded"):
        orthogonalize(stack)
