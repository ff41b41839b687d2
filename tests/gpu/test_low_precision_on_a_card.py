"""Low-precision linear layers on the local GPU. Run with JAX_PLATFORMS=cuda: the tests' default is the CPU."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from unit.precision.reference import (
    AXES,
    NVFP4_ALL,
    case,
    in_fp8,
    in_nvfp4,
    noise,
    plain,
    relative,
    rotated_in_blocks,
)

from jaxtune.errors import UserError
from jaxtune.host.process import compiler_options
from jaxtune.parallel.layout import by_token
from jaxtune.precision.fp8 import Fp8Matmul
from jaxtune.precision.hadamard import SIGNED
from jaxtune.precision.matmul import LowPrecision
from jaxtune.precision.nvfp4 import Nvfp4Matmul
from jaxtune.precision.recipes import check_device
from pallas_kernels.gpus import current_device

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("one_device"),
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="no GPU, or JAX_PLATFORMS does not name it"),
]

# Tensor cores accumulate FP8 products in fewer bits than float32.
WITHIN = 1e-2
LENGTH = 200  # length of a row; not a multiple of 16


def products(numbers, x, w, dy, operands=None, noise=None):
    """Return (y, dx, dW); dW is None for a weight that is given only as operands."""

    def run(x, w, dy):
        leaf = lambda w: LowPrecision(operands, None if operands else w, None, numbers)  # noqa: E731
        y, backward = jax.vjp(lambda x, w: leaf(w).matmul(x, None, noise), x, w)
        return y, *backward(dy)

    x, w, dy = jnp.asarray(x), jnp.asarray(w), jax.device_put(dy, by_token())
    found = jax.jit(run, compiler_options=compiler_options())(x, w, dy)
    return [np.asarray(array, np.float64) for array in found]


def tokens(array):
    return array.reshape(-1, array.shape[-1])


def assert_close(found, expected):
    assert np.abs(tokens(found) - expected).max() <= WITHIN * np.abs(expected).max()


@pytest.fixture
def fp8_units():
    try:
        check_device("fp8_hybrid", current_device())
    except UserError as refusal:
        pytest.skip(str(refusal))


@pytest.mark.usefixtures("fp8_units")
@pytest.mark.parametrize("hadamard", [False, True], ids=["plain", "hadamard"])
def test_fp8_products_are_those_of_the_rounded_sides(hadamard):
    x, w, dy = case(LENGTH)
    turn = rotated_in_blocks if hadamard else np.asarray
    e4m3 = lambda matrix: in_fp8(turn(matrix), ml_dtypes.float8_e4m3fn)  # noqa: E731
    e5m2 = lambda matrix: in_fp8(turn(matrix), ml_dtypes.float8_e5m2)  # noqa: E731
    y, dx, dw = products(Fp8Matmul(hadamard, online=False), x, w, dy)
    assert_close(y, e4m3(tokens(x)) @ e4m3(w).T)
    assert_close(dx, e5m2(tokens(dy)) @ e4m3(w.T.copy()).T)
    assert relative(dw, plain(x, w, dy)[2]) < 0.08
    if not hadamard:
        assert_close(dw, e5m2(tokens(dy).T.copy()) @ e4m3(tokens(x).T.copy()).T)


@pytest.mark.parametrize("four_over_six", [False, True], ids=["six", "four over six"])
def test_nvfp4_products_are_those_of_the_rounded_sides(four_over_six):
    """Blackwell multiplies natively, other GPUs emulate. A division may round differently from the CPU's."""
    x, w, dy = case(LENGTH)
    rounded = lambda matrix: in_nvfp4(matrix, four_over_six=four_over_six)  # noqa: E731
    turn = lambda matrix: rotated_in_blocks(filled(matrix), SIGNED)  # noqa: E731
    weight = in_nvfp4(w, rows=16, four_over_six=four_over_six)
    y, dx, dw = products(Nvfp4Matmul(False, True, four_over_six), x, w, dy)
    sides = rounded(turn(dy)), rounded(turn(x))
    expected = rounded(tokens(x)) @ weight.T, rounded(tokens(dy)) @ weight, sides[0] @ sides[1].T
    for found, wanted in zip((y, dx, dw), expected):
        assert relative(tokens(found), wanted) <= WITHIN


def filled(array):
    """Transpose to features first, and pad each row's positions with zeros to whole blocks."""
    rows = np.pad(array, ((0, 0), (0, -array.shape[1] % 16), (0, 0)))
    return tokens(rows).T.copy()


@pytest.mark.usefixtures("fp8_units")
def test_a_frozen_weight_gives_what_it_gives_when_it_is_rounded_at_use():
    x, w, dy = case(LENGTH)
    numbers = Fp8Matmul(hadamard=False, online=False)
    made = numbers.make(jnp.asarray(w), AXES)
    for frozen, at_use in zip(products(numbers, x, w, dy, made)[:2], products(numbers, x, w, dy)):
        np.testing.assert_array_equal(frozen, at_use)


def test_gradients_that_are_rounded_stochastically_are_as_near():
    x, w, dy = case(LENGTH)
    for found, expected in zip(products(NVFP4_ALL, x, w, dy, noise=noise()), plain(x, w, dy)):
        assert relative(found, expected) < 0.25
