"""Rotating by blocks of a Hadamard matrix changes no product."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxtune.precision.hadamard import PLAIN, SIGNED, rotate_blocks

pytestmark = pytest.mark.usefixtures("one_device")


@pytest.mark.parametrize("matrix", [PLAIN, SIGNED], ids=["plain", "signed"])
def test_the_rotation_is_orthonormal_and_leaves_products_as_they_are(matrix):
    """Exactly, for numbers that need no rounding in float32."""
    assert np.array_equal(matrix @ matrix.T, np.eye(16)) and set(np.abs(matrix).flat) == {0.25}
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-8, 9, (5, 48)).astype(np.float32) for _ in range(2))
    product = np.asarray(rotate_blocks(jnp.asarray(a), matrix)) @ np.asarray(rotate_blocks(jnp.asarray(b), matrix)).T
    assert np.array_equal(product, a @ b.T)
