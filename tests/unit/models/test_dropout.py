"""Dropout is a function of seed, step, row, layer and site."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxtune.models.dropout import Noise, dropout, shaken


def test_dropout_depends_on_the_row_not_on_its_place(one_device):
    x = jax.device_put(jnp.ones((4, 8, 16)), jax.NamedSharding(one_device, jax.P(("data", "fsdp"), "sequence", None)))
    rows = jnp.array([5, 9, 2, 7])
    key = jax.random.key(0)
    found = dropout(x, 0.5, Noise(key, rows))
    again = dropout(x, 0.5, Noise(key, rows[::-1]))
    np.testing.assert_array_equal(found, again[::-1])
    assert 0.3 < float((found == 0).mean()) < 0.7
    assert set(np.unique(found)) == {0.0, 2.0}


def test_noise_on_embeddings_is_that_of_neftune(one_device):
    """Uniform, of at most alpha / sqrt(positions * width), by a row's number wherever it stands; of dealt rows, too."""
    x = jax.device_put(jnp.zeros((2, 8, 16)), jax.NamedSharding(one_device, jax.P(("data", "fsdp"), "sequence", None)))
    key, most = jax.random.key(0), 5 / np.sqrt(8 * 16)
    found = shaken(x, 5.0, Noise(key, jnp.array([5, 9])))
    assert 0.9 * most < np.abs(found).max() <= most and abs(float(found.mean())) < 0.1 * most
    assert abs(float(found.std()) - most / np.sqrt(3)) < 0.1 * most
    dealt = jnp.array([[7, 6, 5, 4, 3, 2, 1, 0]] * 2)
    np.testing.assert_array_equal(shaken(x, 5.0, Noise(key, jnp.array([9, 5]), dealt)), found[::-1, ::-1])
