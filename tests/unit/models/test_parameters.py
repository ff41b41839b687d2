"""Random weights are a function of the seed and the name."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tiny import layer, spec

from jaxtune.models.parameters import declare, draw_parameter, randomize
from jaxtune.models.structure.layer_spec import Layer
from jaxtune.models.structure.mixers import DeltaNet, Mamba2, RandomSteps
from jaxtune.parallel.mesh import make_mesh
from jaxtune.parallel.options import MeshOptions


def test_random_weights_depend_on_neither_stack_nor_mesh(one_device):
    def weights(layers):
        _, declared = declare(spec(layers))
        # Two are enough: each is drawn independently, and takes a second to compile.
        declared = {name: p for name, p in declared.items() if p.local in ("attention.q.weight", "mlp.down.weight")}
        values = randomize(declared, seed=3)
        return {
            (p.local, number): np.asarray(values[name][i])
            for name, p in declared.items()
            for i, number in enumerate(p.layers)
        }

    together = weights((layer(),) * 4)
    jax.tree.map(np.testing.assert_array_equal, together, weights((layer(window=4), *(layer(),) * 3)))
    make_mesh(MeshOptions(fsdp=4, tensor=2), jax.devices())
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), together, weights((layer(),) * 4))
    assert len(together) == 8 and optax.tree.norm(together) > 0


def test_a_delta_net_starts_with_rates_and_steps_between_their_bounds(one_device):
    steps = RandomSteps(1e-3, 1e-1)
    net = DeltaNet(key_heads=1, value_heads=64, key_dim=2, value_dim=2, kernel=2, rates=(2.0, 3.0), steps=steps)
    values = random_vectors(Layer(net, layer().feed_forward), "olmo_hybrid", "log_rate", "step_bias")
    rates, steps = jnp.exp(values["delta_net.log_rate"]), jax.nn.softplus(values["delta_net.step_bias"])
    assert 2 <= rates.min() < 2.1 and 2.9 < rates.max() <= 3
    # Half of the steps are below the geometric mean.
    assert steps.min() >= 0.999e-3 and steps.max() <= 1.001e-1 and 0.005 < jnp.median(steps) < 0.02


def test_mamba2_starts_with_steps_between_their_bounds_and_above_the_floor(one_device):
    mamba = Mamba2(heads=64, head_dim=2, groups=1, state=2, kernel=2, steps=RandomSteps(1e-2, 1.0, floor=0.05))
    values = random_vectors(Layer(mamba, None), "nemotron_h", "step_bias")
    steps = jax.nn.softplus(values["mamba.step_bias"])
    assert steps.max() <= 1.001 and 0.05 < jnp.median(steps) < 0.2
    # log(5) / log(100) = 35% are drawn below the floor.
    np.testing.assert_allclose(steps.min(), 0.05, rtol=1e-4)
    assert 10 < jnp.sum(steps < 0.0501) < 35


def random_vectors(layer: Layer, family: str, *names: str) -> dict[str, jax.Array]:
    """Draw the vectors of a layer with these last names."""
    parameters = declare(spec((layer,), family=family))[1].values()
    wanted = [p for p in parameters if p.local.rsplit(".", 1)[-1] in names]
    return {p.local: draw_parameter(p, jax.random.key(0)) for p in wanted}
