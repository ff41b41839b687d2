"""The update of 8-bit AdamW on the GPU at hand. Run with JAX_PLATFORMS=cuda: the tests' default is the CPU."""

from functools import partial

import jax
import pytest
from kernels.adamw_8bit_cases import ADAM, STACKS, Stack, assert_updated

from pallas_kernels.adamw_8bit import BACKENDS, adamw_8bit, reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="no GPU, or JAX_PLATFORMS does not name it"),
]

LARGE = Stack((4, 1024, 4096), (1, 256))


@pytest.mark.parametrize("stack", [*STACKS.values(), LARGE], ids=[*STACKS, "large"])
@pytest.mark.parametrize("backend", [backend.name for backend in BACKENDS])
def test_an_update_equals_the_reference_on_a_cpu(backend, stack):
    """The same random bits, too."""
    gradient, before, step = stack.arguments()
    found = jax.jit(partial(adamw_8bit, adam=ADAM, backend=backend))(gradient, before, step)
    with jax.default_device(jax.devices("cpu")[0]):
        expected = jax.jit(partial(reference.update, adam=ADAM))(*jax.device_put((gradient, before, step)))
    assert_updated(jax.device_get(found), jax.device_get(expected))


def test_the_kernel_is_the_same_every_time():
    update = jax.jit(partial(adamw_8bit, adam=ADAM, backend="triton"))
    first, second = (jax.device_get(update(*LARGE.arguments())) for _ in range(2))
    jax.tree.map(lambda one, other: (one == other).all() or pytest.fail("they differ"), first, second)
