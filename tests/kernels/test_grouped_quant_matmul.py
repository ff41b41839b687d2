"""Grouped products with quantized weights against a loop over rows in float64: forward and gradient, every backend."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels.quant_cases import Weight, assert_product, in_float64, rows_of

from pallas_kernels.grouped_matmul import arrange
from pallas_kernels.grouped_quant_matmul import BACKENDS, fused, grouped_quant_matmul
from pallas_kernels.registry import Backend, never_refuses

COVERS = ("pallas_kernels", "tests/kernels", "tests/conftest.py")

EXPERTS = 4
# Neither is a multiple of a tile, so that a tile would reach into the next expert's rows.
WEIGHTS = {
    "nf4": Weight(70, 192, (1, 64)),
    "e2m1": Weight(37, 96, (1, 32)),
    "e4m3": Weight(64, 256, (32, 128)),
    "int8": Weight(66, 138, (1, 138)),
}
# One huge group, an empty one, and small ones.
ITEMS = [0] * 40 + [1] * 3 + [3] * 5


@pytest.fixture(params=[backend.name for backend in BACKENDS])
def backend(request, monkeypatch):
    """Select one backend, with its kernels interpreted."""
    monkeypatch.setattr(fused, "multiply", partial(fused.multiply, interpret=True))
    backends = {backend.name: backend for backend in BACKENDS}
    here = backends[request.param]
    monkeypatch.setattr(
        "pallas_kernels.grouped_quant_matmul.BACKENDS", (Backend(here.name, here.run, never_refuses, here.proofs),)
    )
    return request.param


@pytest.mark.parametrize("elements", WEIGHTS)
def test_product_and_gradient_equal_a_loop_over_rows(elements, backend):
    weight = WEIGHTS[elements]
    stored = [weight.arrays(elements, seed=seed)[:2] for seed in range(EXPERTS)]
    codes, scales = (jnp.asarray(np.stack(part)) for part in zip(*stored))
    arrangement = jax.jit(arrange, static_argnums=(1, 2, 3))(jnp.asarray(ITEMS), EXPERTS, "auto", 16)
    is_of = np.asarray(arrangement.item_of)[:, None] < len(ITEMS)
    x, dy = (rows_of(len(is_of), width, "bfloat16") * is_of for width in (weight.columns, weight.rows))

    @jax.jit
    def both(x, dy):
        y, pull = jax.vjp(lambda x: grouped_quant_matmul(x, codes, scales, arrangement.groups, elements=elements), x)
        return y, pull(dy)[0]

    y, dx = both(x, dy)
    item_of = np.asarray(arrangement.item_of)
    expert_of = np.append(ITEMS, EXPERTS)[item_of]
    for expert, arrays in enumerate(stored):
        rows, matrix = expert_of == expert, in_float64(*arrays, None, elements)
        assert_product(y[rows], x[rows], matrix.T, "bfloat16")
        assert_product(dx[rows], dy[rows], matrix, "bfloat16")
    empty = expert_of == EXPERTS
    assert empty.any() and not np.asarray(y)[empty].any() and not np.asarray(dx)[empty].any()
