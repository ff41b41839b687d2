"""AdamW with 8-bit moments on eight devices: the same codes and parameters as on one."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtune.optim.adamw_8bit import adamw_8bit
from jaxtune.optim.build import Trained, UpdateInputs, build
from jaxtune.optim.options import OptimOptions
from jaxtune.optim.rules import Hyperparameters
from jaxtune.parallel.mesh import make_mesh
from jaxtune.parallel.options import MeshOptions

RATE = 1e-2
RULE = adamw_8bit(0.9, 0.99, 1e-8)
# A matrix with blocks inside rows, one with blocks of 32 x 8, a vector, and a parameter that stays in float32.
PARAMETERS = {
    "wide": ((16, 2048), jax.P("tensor", "fsdp")),
    "narrow": ((2048, 8), jax.P("fsdp", None)),
    "vector": ((4096,), jax.P("fsdp")),
    "small": ((8, 64), jax.P("fsdp", None)),
}


def trained(mesh: MeshOptions, devices: int):
    """Parameters and states after 5 updates."""
    made = make_mesh(mesh, jax.devices()[:devices])
    rng = np.random.default_rng(0)

    def values(shape, spec):
        return jax.device_put(rng.normal(size=shape).astype(np.float32), jax.NamedSharding(made, spec))

    parameters = {name: values(*declared) for name, declared in PARAMETERS.items()}
    states = {name: jax.jit(RULE.init)(parameter) for name, parameter in parameters.items()}
    for name, state in states.items():
        for leaf in jax.tree.leaves(state):
            assert leaf.sharding.is_equivalent_to(parameters[name].sharding, leaf.ndim), name

    @jax.jit
    def update(gradients, states, parameters, count):
        at = Hyperparameters(count, jnp.float32(RATE), 0.5, 0.1)
        return {name: RULE.update(gradients[name], states[name], parameters[name], at) for name in parameters}

    for count in range(5):
        gradients = {name: values(*declared) for name, declared in PARAMETERS.items()}
        after = update(gradients, states, parameters, jnp.int32(count))
        parameters, states = ({name: both[part] for name, both in after.items()} for part in (0, 1))
    return jax.tree.map(np.asarray, (parameters, states))


@pytest.mark.every_jax
@pytest.mark.parametrize("mesh", [MeshOptions(fsdp=8), MeshOptions(fsdp=4, tensor=2)], ids=["fsdp8", "fsdp4-tensor2"])
def test_eight_devices_equal_one(mesh):
    """Bit for bit, except if the compiler's other choice of fused multiply-adds moves a moment across a tie."""
    (expected, expected_states), (found, states) = trained(MeshOptions(fsdp=1), 1), trained(mesh, 8)
    for name, parameter in found.items():
        apart = np.abs(parameter - expected[name])
        assert apart.max() <= 0.1 * RATE and (apart > 1e-6).mean() <= 2e-4, name
    for leaf, expected_leaf in zip(jax.tree.leaves(states), jax.tree.leaves(expected_states), strict=True):
        if leaf.dtype == np.uint8:
            apart = np.abs(leaf.astype(int) - expected_leaf)
            assert apart.max() <= 1 and apart.mean() <= 2e-4
        else:
            np.testing.assert_allclose(leaf, expected_leaf, rtol=1e-6, atol=1e-7)


def test_nothing_crosses_devices():
    made = make_mesh(MeshOptions(fsdp=4, tensor=2), jax.devices())
    matrix = jax.device_put(jnp.zeros((16, 1024)), jax.NamedSharding(made, jax.P("tensor", "fsdp")))
    state = jax.jit(RULE.init)(matrix)
    text = jax.jit(RULE.update).lower(matrix, state, matrix, Hyperparameters(0, 1e-2, 1.0, 0.1)).compile().as_text()
    assert not any(kind in text for kind in ("all-gather", "all-reduce", "all-to-all", "collective-permute"))


# Leading axes, shape, layout, and the layout of state and update if different. "small" stays float32.
ROUNDED = {
    "stack": ((3,), (3, 16, 2048), jax.P(None, "tensor", "fsdp"), None),
    "vectors": ((3,), (3, 4096), jax.P(None, "fsdp"), None),
    "matrix": ((), (64, 1024), jax.P("tensor", "fsdp"), None),
    "replicated": ((3,), (3, 16, 1024), jax.P(None, None, None), jax.P(None, "fsdp", "tensor")),
    "small": ((3,), (3, 8, 64), jax.P(None, "fsdp", None), None),
}


@pytest.mark.parametrize("name", ["adamw_8bit", "adamw"])
def test_bfloat16_is_rounded_by_the_same_bits_on_any_mesh(name):
    """Two updates on eight devices and on one: except for ties, each weight is rounded to the same neighbour."""

    def after(mesh: MeshOptions, devices: int) -> dict[str, np.ndarray]:
        made = make_mesh(mesh, jax.devices()[:devices])
        trained = {
            key: Trained((key,) * math.prod(lead), lead, state_spec=spec) for key, (lead, _, _, spec) in ROUNDED.items()
        }
        optimizer = build(OptimOptions(name=name, weight_decay=0.1), trained, 3)
        rng = np.random.default_rng(0)

        def values() -> dict[str, jax.Array]:
            return {
                key: jax.device_put(jnp.asarray(rng.normal(size=shape), jnp.bfloat16), jax.NamedSharding(made, spec))
                for key, (_, shape, spec, _) in ROUNDED.items()
            }

        parameters, update = values(), jax.jit(optimizer.update)
        state = jax.jit(optimizer.init)(parameters)
        for number in range(2):
            step = UpdateInputs(jnp.float32(RATE), jnp.float32(1), jnp.bool(True), jax.random.key(number))
            parameters, state = update(values(), state, parameters, step)
        return jax.tree.map(lambda array: np.asarray(array, np.float32), parameters)

    expected, found = after(MeshOptions(), 1), after(MeshOptions(fsdp=4, tensor=2), 8)
    for key, parameter in found.items():
        assert (parameter != expected[key]).mean() <= 1e-3, key
