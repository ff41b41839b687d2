"""Every FP8 backend on the local GPU. Run with JAX_PLATFORMS=cuda: the tests' default is the CPU."""

from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from kernels.fp8_cases import BLOCKS, ROW, TENSOR, Case, arguments, assert_close

from pallas_kernels.fp8_matmul import BACKENDS, fp8_matmul, quantize

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="no GPU, or JAX_PLATFORMS does not name it"),
]

LARGE = partial(Case, rows=1000, columns=1024, depth=4096)
CASES = {
    "tensor": LARGE(blocks=TENSOR),
    "tensor, e5m2, float32": LARGE(blocks=TENSOR, x_dtype="float8_e5m2", dtype="float32"),
    "rows and channels": LARGE(blocks=ROW),
    "blocks": LARGE(blocks=BLOCKS),
    "blocks, e5m2, float16": LARGE(blocks=BLOCKS, x_dtype="float8_e5m2", dtype="float16"),
}
# Tensor cores accumulate FP8 products in fewer bits than float32, at least within a block of k, before promotion.
FEWER_BITS = {"xla": 0.0, "cublaslt": 1e-2, "mosaic": 1e-2}
FAST = 3e-2


def multiply(case, given, **options):
    options = {"dtype": case.dtype} | options
    compiled = jax.jit(partial(fp8_matmul, **options), compiler_options={"xla_gpu_enable_triton_gemm": False})
    try:
        return compiled(*given)
    except ValueError as refusal:
        if "cannot run this on" not in str(refusal):
            raise
        pytest.skip(str(refusal))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("backend", [backend.name for backend in BACKENDS])
def test_equals_float64(backend, case):
    given = arguments(case)
    with jax.default_matmul_precision("highest"):  # plain XLA must multiply the decoded values in float32, not TF32
        found = multiply(case, given, backend=backend)
    assert_close(found, given, case.dtype, FEWER_BITS[backend])


def test_fast_accumulation_loses_little():
    case = CASES["tensor"]
    given = arguments(case)
    fast, exact = (
        np.asarray(multiply(case, given, backend="cublaslt", fast_accumulation=fast), np.float64)
        for fast in (True, False)
    )
    assert np.abs(fast - exact).max() <= FAST * np.abs(exact).max()


def test_codes_are_rounded_as_by_ml_dtypes():
    """Includes subnormal codes and ties."""
    values = np.random.default_rng(0).normal(size=(64, 1024)).astype(np.float32)
    values[:, :512] = np.round(values[:, :512] * 64) / 64
    got = np.asarray(quantize(jnp.asarray(values), jnp.ones((1, 1))))
    np.testing.assert_array_equal(got.view(np.uint8), values.astype(ml_dtypes.float8_e4m3fn).view(np.uint8))
