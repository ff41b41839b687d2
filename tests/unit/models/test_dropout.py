"""Dropout is a function of seed, step, row, layer and site."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxtune.models.dropout import Noise, dropout


def test_dropout_depends_on_the_row_not_on_its_place(one_device):
    x = jax.device_put(jnp.ones((4, 8, 16)), jax.NamedSharding(one_device, jax.P(("data", "fsdp"), "sequence", None)))
    rows = jnp.array([5, 9, 2, 7])
    key = jax.random.key(0)
    found = dropout(x, 0.5, Noise(key, rows))
    again = dropout(x, 0.5, Noise(key, rows[::-1]))
    np.testing.assert_array_equal(found, again[::-1])
    assert 0.3 < float((found == 0).mean()) < 0.7
    assert set(np.unique(found)) == {0.0, 2.0}
