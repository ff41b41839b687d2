"""The update of 8-bit AdamW on the local GPU. Run with JAX_PLATFORMS=cuda: the tests' default is the CPU."""

from functools import partial

import jax
import numpy as np
import pytest
from kernels.adamw_8bit_cases import ADAM, STACKS, Stack, assert_updated

from pallas_kernels.adamw_8bit import adamw_8bit, reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="no GPU, or JAX_PLATFORMS does not name it"),
]

LARGE = Stack((4, 1024, 4096), (1, 256))


@pytest.mark.parametrize("stack", [*STACKS.values(), LARGE], ids=[*STACKS, "large"])
def test_the_kernel_equals_the_reference(stack):
    """The result is also the same in every run."""
    arguments = stack.arguments()
    update = jax.jit(partial(adamw_8bit, adam=ADAM, backend="triton"))
    found, again = update(*arguments), update(*arguments)
    jax.tree.map(np.testing.assert_array_equal, found, again)
    assert_updated(found, jax.jit(partial(reference.update, adam=ADAM))(*arguments))


def test_a_step_that_is_not_finite_changes_no_bit():
    gradient, before, step = LARGE.arguments(finite=False)
    after = jax.jit(partial(adamw_8bit, adam=ADAM, backend="triton"))(gradient, before, step)
    jax.tree.map(np.testing.assert_array_equal, after, before)
