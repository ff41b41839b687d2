"""Parameters with experts that are divided over devices take the same steps as on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtune.optim.build import Trained, build
from jaxtune.optim.options import OptimOptions
from jaxtune.optim.rules import UpdateInputs
from jaxtune.parallel.mesh import make_mesh
from jaxtune.parallel.options import MeshOptions

LAYERS, EXPERTS = 2, 4
NAMES = tuple(
    f"layers.{layer}.mlp.experts.{expert}.up_proj.weight" for layer in range(LAYERS) for expert in range(EXPERTS)
)


def steps_on(mesh: MeshOptions, devices: int, name: str) -> np.ndarray:
    """The parameter after three steps, with rates that differ by layer and by expert."""
    multipliers = (r"layers\.0\.=0.5", r"experts\.3\.=0.1")
    optim = OptimOptions(name, learning_rate=1e-2, schedule="constant", weight_decay=0.1, lr_multipliers=multipliers)
    spec = jax.P(None, "expert" if mesh.expert > 1 else None, "tensor", None)
    place = jax.NamedSharding(make_mesh(mesh, jax.devices()[:devices]), spec)
    rng = np.random.default_rng(0)
    values, gradient = (
        jax.device_put(rng.normal(size=(LAYERS, EXPERTS, 64, 64)).astype(np.float32), place) for _ in range(2)
    )
    # Muon's products in float32: those in bfloat16 round differently in batches of other sizes.
    optimizer = build(optim, {"w": Trained(NAMES, (LAYERS, EXPERTS), True)}, LAYERS, jnp.float32)
    parameters, state = {"w": values}, jax.jit(optimizer.init)({"w": values})
    for number in range(3):
        step = UpdateInputs(jnp.float32(1e-2), jnp.float32(1), jnp.bool(True), jax.random.key(number))
        parameters, state = jax.jit(optimizer.update)({"w": gradient}, state, parameters, step)
    assert jax.typeof(parameters["w"]).sharding.spec == spec
    return np.asarray(parameters["w"])


@pytest.mark.parametrize("name", ["adamw", "adamw_8bit", "lion", "schedule_free", "sgd", "muon", "normuon"])
def test_equals_one_device(name):
    expected = steps_on(MeshOptions(), 1, name)
    found = steps_on(MeshOptions(fsdp=1, expert=4, tensor=2), 8, name)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7)
    assert len({float(np.abs(found[layer, expert]).sum()) for layer in range(LAYERS) for expert in range(EXPERTS)}) == 8
