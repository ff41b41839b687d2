"""Quantized weights and products on the local GPU. Run with JAX_PLATFORMS=cuda: the tests' default is the CPU."""

import jax
import pytest
from kernels.quant_cases import WEIGHTS, Weight, assert_product, assert_weight, in_float64, rows_of

from pallas_kernels.quant_matmul import BACKENDS, DEQUANTIZE_BACKENDS, ELEMENTS, dequantize, quant_matmul

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="no GPU, or JAX_PLATFORMS does not name it"),
]

LARGE = Weight(1024, 4096, (1, 64))


@pytest.mark.parametrize("weight", [*WEIGHTS.values(), LARGE], ids=[*WEIGHTS, "large"])
@pytest.mark.parametrize("elements", ELEMENTS)
@pytest.mark.parametrize("backend", [backend.name for backend in DEQUANTIZE_BACKENDS])
def test_weight_equals_float64(backend, elements, weight):
    arrays = weight.arrays(elements, nan=True)
    for dtype in ("bfloat16", "float32"):
        whole = dequantize(*arrays, elements=elements, dtype=dtype, backend=backend)
        assert_weight(whole, arrays, elements, dtype)


@pytest.mark.parametrize("rows", [1, 16, 300])
@pytest.mark.parametrize("elements", ELEMENTS)
@pytest.mark.parametrize("backend", [backend.name for backend in BACKENDS])
def test_product_and_gradient_equal_float64(backend, elements, rows):
    arrays = LARGE.arrays(elements)
    x, d_out = rows_of(rows, LARGE.columns, "bfloat16"), rows_of(rows, LARGE.rows, "bfloat16")

    @jax.jit
    def both(x):
        out, pull = jax.vjp(lambda x: quant_matmul(x, *arrays, elements=elements, backend=backend), x)
        return out, pull(d_out)[0]

    out, d_x = both(x)
    expected = in_float64(*arrays, elements)
    assert_product(out, x, expected.T, "bfloat16")
    assert_product(d_x, d_out, expected, "bfloat16")
