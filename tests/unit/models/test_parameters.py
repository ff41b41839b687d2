"""Random weights are a function of the seed and the name."""

from functools import partial

import jax
import numpy as np
import optax
from tiny import layer, spec

from jaxtune.models.parameters import declare, randomize
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
