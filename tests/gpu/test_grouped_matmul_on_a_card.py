"""Every backend of the grouped product on the local GPU. Run with JAX_PLATFORMS=cuda: the default is the CPU."""

import jax
import numpy as np
import pytest
from kernels.grouped_cases import assert_equal_to_float64

from pallas_kernels.grouped_matmul import BACKENDS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="no GPU, or JAX_PLATFORMS does not name it"),
]

GROUPS = 8
ITEMS = {
    "one huge group and empty ones": [0] * 3900 + [5] * 100,
    "every group": np.random.default_rng(0).integers(0, GROUPS, 4000).tolist(),
    "a few items": [1, 2, 2, 6] * 10,
}
SHAPES = {"whole tiles": (768, 1024), "parts of tiles": (200, 328), "adapter": (16, 768)}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("items", ITEMS.values(), ids=ITEMS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("backend", sorted({backend.name for backend in BACKENDS}))
def test_equals_a_loop_over_groups_in_float64(backend, dtype, items, shape):
    try:
        assert_equal_to_float64(items, GROUPS, shape, dtype, backend)
    except ValueError as refusal:
        if "cannot run this on" not in str(refusal):
            raise
        pytest.skip(str(refusal))
