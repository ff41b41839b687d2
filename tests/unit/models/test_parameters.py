"""Random weights are a function of the seed and the name."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tiny import spec

from jaxtune.models.parameters import declare, randomize
from jaxtune.models.spec import Layer


def test_random_weights_depend_on_neither_stack_nor_mesh(one_device):
    def weights(layers):
        _, declared = declare(spec(layers))
        # Two are enough, as each is drawn by itself, and each takes a second to compile.
        declared = {name: p for name, p in declared.items() if p.local in ("attention.q.weight", "mlp.down.weight")}
        values = randomize(declared, dict.fromkeys(declared, jnp.dtype("float32")), seed=3)
        return {
            (p.local, layer): np.asarray(values[name][i])
            for name, p in declared.items()
            for i, layer in enumerate(p.layers)
        }

    together = weights((Layer(),) * 4)
    jax.tree.map(np.testing.assert_array_equal, together, weights((Layer(window=4), *(Layer(),) * 3)))
    assert len(together) == 8 and optax.tree.norm(together) > 0
