"""The gradient of an embedding table sums all positions of a token, in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtune.models.layers.lookup import lookup


@pytest.fixture(autouse=True)
def on_one_device(one_device):
    """Set the mesh that activations are laid out on."""


def gradient(table, tokens, dy):
    def pulled_back(table, tokens, dy):
        vectors, pull_back = jax.vjp(lambda table: lookup(table, tokens), table)
        return pull_back(jax.reshard(dy, jax.typeof(vectors).sharding.spec))[0]

    return np.asarray(jax.jit(pulled_back)(table, tokens, dy), np.float64)


@pytest.mark.parametrize("vocabulary", [7, 500])
def test_the_gradient_is_the_sum_over_the_places_of_a_token(vocabulary):
    rng = np.random.default_rng(0)
    table, dy = rng.normal(size=(vocabulary, 6)), rng.normal(size=(3, 40, 6))
    tokens = rng.integers(0, vocabulary, size=(3, 40))
    expected = np.zeros_like(table)
    np.add.at(expected, tokens, dy)
    result = gradient(jnp.asarray(table, jnp.float32), jnp.asarray(tokens), jnp.asarray(dy, jnp.float32))
    np.testing.assert_allclose(result, expected, atol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_frequent_token_is_not_lost_in_few_bits(dtype):
    """Added one by one, ones would stop at 256 in bfloat16, and at 2048 in float16."""
    ones = jnp.ones((1, 4096, 2), dtype)
    result = gradient(jnp.zeros((3, 2), dtype), jnp.ones((1, 4096), jnp.int32), ones)
    np.testing.assert_array_equal(result, [[0, 0], [4096, 4096], [0, 0]])
