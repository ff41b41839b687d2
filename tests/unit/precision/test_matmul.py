"""FP8 and NVFP4 products of a linear layer, against numbers rounded by ml_dtypes and multiplied in float64."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxtune.parallel.layout import P, by_token
from jaxtune.precision.fp8 import Fp8Matmul
from jaxtune.precision.hadamard import SIGNED
from jaxtune.precision.matmul import LowPrecision
from jaxtune.precision.nvfp4 import Nvfp4Matmul
from jaxtune.quant.format_names import format_of
from jaxtune.quant.options import QuantOptions
from unit.precision.reference import (
    AXES,
    FP8,
    FP8_ROTATED,
    INNER,
    LENGTH,
    NVFP4,
    NVFP4_ALL,
    OUT,
    ROWS,
    assert_same,
    case,
    in_fp8,
    in_nvfp4,
    noise,
    plain,
    products,
    relative,
    rotated_in_blocks,
    scale_of_bfloat16,
    tokens,
)

pytestmark = pytest.mark.usefixtures("one_device")


@pytest.mark.parametrize("given", ["operands", "weight"])
@pytest.mark.parametrize("numbers", [FP8, FP8_ROTATED], ids=["plain", "hadamard"])
def test_fp8_products_are_those_of_the_rounded_sides(numbers, given):
    """e4m3 times e4m3, e5m2 times e4m3; each rotated along the contracted dimension."""
    x, w, dy = case()
    turn = rotated_in_blocks if numbers.hadamard else np.asarray
    e4m3 = lambda matrix: in_fp8(turn(matrix), ml_dtypes.float8_e4m3fn)  # noqa: E731
    e5m2 = lambda matrix: in_fp8(turn(matrix), ml_dtypes.float8_e5m2)  # noqa: E731
    operands = numbers.make(jnp.asarray(w), AXES) if given == "operands" else None
    y, dx, dw, _ = products(x, LowPrecision(operands, jnp.asarray(w), None, numbers), dy)
    assert_same(tokens(y), e4m3(tokens(x)) @ e4m3(w).T)
    assert_same(tokens(dx), e5m2(tokens(dy)) @ e4m3(w.T.copy()).T)
    assert_same(dw, e5m2(tokens(dy).T.copy()) @ e4m3(tokens(x).T.copy()).T)
    for actual, expected, most in zip((y, dx, dw), plain(x, w, dy), (0.05, 0.08, 0.08)):
        assert 0.01 < relative(actual, expected) < most


@pytest.mark.parametrize("four_over_six", [False, True], ids=["six", "four over six"])
@pytest.mark.parametrize("hadamard", [False, True], ids=["plain", "hadamard"])
def test_nvfp4_products_are_those_of_the_rounded_sides(hadamard, four_over_six):
    """Weights in blocks of 16 x 16, the same for both products; dW is rotated along the tokens."""
    x, w, dy = case()
    numbers = Nvfp4Matmul(False, hadamard, four_over_six)
    turn = (lambda matrix: rotated_in_blocks(matrix, SIGNED)) if hadamard else np.asarray
    rounded = lambda matrix: in_nvfp4(matrix, four_over_six=four_over_six)  # noqa: E731
    weight = in_nvfp4(w, rows=16, four_over_six=four_over_six)
    y, dx, dw, _ = products(x, LowPrecision(None, jnp.asarray(w), None, numbers), dy)
    assert_same(tokens(y), rounded(tokens(x)) @ weight.T)
    assert_same(tokens(dx), rounded(tokens(dy)) @ weight)
    assert_same(dw, rounded(turn(tokens(dy).T.copy())) @ rounded(turn(tokens(x).T.copy())).T)
    for actual, expected in zip((y, dx, dw), plain(x, w, dy)):
        assert 0.05 < relative(actual, expected) < 0.25


@pytest.mark.parametrize("numbers", [FP8, FP8_ROTATED], ids=["plain", "hadamard"])
def test_delayed_scales_are_used_and_their_cotangent_is_the_largest_magnitudes(numbers):
    """The cotangent does not depend on the loss; values too large for a scale saturate."""
    x, w, dy = case()
    turn = rotated_in_blocks if numbers.hadamard else np.asarray
    scales = np.array([np.abs(x).max() / 448 / 4, np.abs(dy).max() / 57344 * 8], np.float32)
    y, dx, dw, maxima = products(x, LowPrecision(None, jnp.asarray(w), jnp.asarray(scales), numbers), dy)
    e4m3, e5m2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
    left, gradient = in_fp8(turn(tokens(x)), e4m3, scales[0]), in_fp8(turn(tokens(dy)), e5m2, scales[1])
    assert np.abs(left).max() == np.float64(scale_of_bfloat16(scales[0])) * 448
    assert_same(tokens(y), left @ in_fp8(turn(w), e4m3).T)
    assert_same(tokens(dx), gradient @ in_fp8(turn(w.T.copy()), e4m3).T)
    if not numbers.hadamard:
        assert_same(dw, gradient.T @ left)
    expected = np.abs(turn(tokens(x))).max(), np.abs(turn(tokens(dy))).max()
    np.testing.assert_allclose(maxima, expected, rtol=1e-6)


def test_a_delayed_scale_of_zero_stands_for_the_tensor_s_own():
    """As in the first steps: x has a scale already, dy has none. Only `online` numbers use the tensor's own scale."""
    x, w, dy = case()
    scales, online = jnp.asarray([0.5, 0.0]), Fp8Matmul(hadamard=False, online=True)
    y, dx, _, maxima = products(x, LowPrecision(None, jnp.asarray(w), scales, online), dy)
    current = products(x, LowPrecision(None, jnp.asarray(w), None, FP8), dy)
    assert np.array_equal(dx, current[1]) and not np.array_equal(y, current[0])
    np.testing.assert_allclose(maxima, [np.abs(x).max(), np.abs(dy).max()])
    nonzero = jnp.asarray([0.5, np.abs(dy).max() / 57344])
    offline = products(x, LowPrecision(None, jnp.asarray(w), nonzero, FP8), dy)
    assert np.array_equal(offline[0], y) and np.array_equal(offline[1], dx)


@pytest.mark.parametrize("numbers", [FP8, FP8_ROTATED, NVFP4_ALL], ids=["fp8", "hadamard", "nvfp4"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_gradient_has_the_dtype_of_its_weight_and_activations_keep_theirs(numbers, dtype):
    x, w, dy = case()
    leaf = LowPrecision(numbers.make(jnp.asarray(w), AXES), jnp.asarray(w, dtype), None, numbers)
    y, dx, dw, _ = products(jnp.asarray(x, jnp.bfloat16), leaf, dy, noise())
    assert (y.dtype, dx.dtype, dw.dtype) == (jnp.bfloat16, jnp.bfloat16, dtype)
    for actual, expected in zip((y, dx, dw), plain(x, w, dy)):
        assert relative(actual, expected) < 0.25


@pytest.mark.parametrize("numbers", [FP8, FP8_ROTATED, NVFP4_ALL], ids=["fp8", "hadamard", "nvfp4"])
def test_rows_whose_length_is_no_multiple_of_16(numbers):
    """dW is contracted over tokens: padded with zeros, which change nothing."""
    x, w, dy = case(length=11)
    _, _, dw, _ = products(x, LowPrecision(None, jnp.asarray(w), None, numbers), dy, noise())
    assert relative(dw, plain(x, w, dy)[2]) < (0.08 if isinstance(numbers, Fp8Matmul) else 0.25)


@pytest.mark.parametrize("numbers", [FP8, NVFP4_ALL], ids=["fp8", "nvfp4"])
def test_a_frozen_weight_keeps_nothing_of_x(numbers):
    x, w, dy = map(jnp.asarray, case())
    frozen = LowPrecision(numbers.make(w, AXES), None, None, numbers)

    def kept(leaf):
        backward = jax.eval_shape(lambda x: jax.vjp(lambda x: leaf.matmul(x, None, noise()), x)[1], x)
        return {array.shape for array in jax.tree.leaves(backward)}

    assert x.shape not in kept(frozen)
    assert x.shape in kept(LowPrecision(frozen.operands, w, None, numbers))
    y, dx, _, _ = products(x, frozen, dy, noise())
    again, dx_again, _, _ = products(x, LowPrecision(None, w, None, numbers), dy, noise())
    assert np.array_equal(y, again) and np.array_equal(dx, dx_again)


@pytest.mark.parametrize(
    ("numbers", "format"), [(FP8, "nf4"), (FP8, "fp8"), (NVFP4_ALL, "nvfp4")], ids=["nf4", "fp8", "nvfp4"]
)
def test_a_quantized_base_is_dequantized_and_rounded_again(numbers, format):
    x, w, dy = case()
    w = np.tile(w, (4, 4))[:128, :128]
    x, dy = np.tile(x, 2), np.tile(dy, 3)[..., :128]
    base = jax.jit(format_of(QuantOptions(format=format), "").quantize)(jnp.asarray(w))
    values = jax.jit(type(base).dequantize)(base)
    results = products(x, LowPrecision(None, base, None, numbers), dy, noise())
    expected = products(x, LowPrecision(numbers.make(values, AXES), None, None, numbers), dy, noise())
    assert results[2] is None
    assert np.array_equal(results[0], expected[0]) and np.array_equal(results[1], expected[1])


@pytest.mark.parametrize("numbers", [FP8, FP8_ROTATED, NVFP4_ALL], ids=["fp8", "hadamard", "nvfp4"])
def test_zeros_stay_zeros(numbers):
    x, w, dy = (jnp.zeros_like(array) for array in case())
    for product in products(x, LowPrecision(None, w, None, numbers), dy, noise())[:3]:
        assert not np.asarray(product).any()


@pytest.mark.parametrize("numbers", [FP8, NVFP4_ALL], ids=["fp8", "nvfp4"])
def test_what_is_not_finite_is_not_hidden(numbers):
    """Its row is NaN, and so are the entries of dW that it enters; other rows are as without it."""
    x, w, dy = case()
    leaf = LowPrecision(None, jnp.asarray(w), None, numbers)
    expected = products(x, leaf, dy, noise())
    x[1, 3, 4], x[0, 4, 4], dy[0, 2, 1], dy[1, 1, 1] = np.nan, np.inf, np.nan, -np.inf
    y, dx, dw, _ = products(x, leaf, dy, noise())
    for actual, without, rows in ((y, expected[0], ((1, 0), (3, 4))), (dx, expected[1], ((0, 1), (2, 1)))):
        bad = np.zeros(actual.shape[:2], bool)
        bad[rows] = True
        assert np.isnan(np.asarray(actual)[bad]).all()
        assert np.array_equal(np.asarray(actual)[~bad], np.asarray(without)[~bad])
    assert np.isnan(np.asarray(dw)[1]).all() and np.isnan(np.asarray(dw)[:, 4]).all()


@pytest.mark.parametrize("bad", [np.nan, -np.inf])
@pytest.mark.parametrize("numbers", [FP8, NVFP4_ALL], ids=["fp8", "nvfp4"])
def test_a_weight_that_is_not_finite_is_not_hidden(numbers, bad):
    x, w, dy = case()
    w[3, 5] = bad
    y, dx, _, _ = products(x, LowPrecision(None, jnp.asarray(w), None, numbers), dy, noise())
    assert np.isnan(np.asarray(y)[..., 3]).all() and np.isnan(np.asarray(dx)[..., 5]).all()


@pytest.mark.parametrize("numbers", [FP8, NVFP4_ALL], ids=["fp8", "nvfp4"])
def test_stacked_leaves_in_a_rematerialised_scan_and_micro_batches(numbers):
    """A scan over layers, summed over micro-batches, equals a loop over the layers."""
    layers, micro = 2, 2
    rng = np.random.default_rng(0)
    weights = jnp.asarray(rng.normal(size=(layers, INNER, INNER)) / 8, jnp.float32)
    batch = jax.device_put(rng.normal(size=(micro, ROWS, LENGTH, INNER)).astype(np.float32), P(None, *by_token()))
    scales = jnp.full((layers, 2), 0.01) if numbers is FP8 else None

    def loss(trained, x, make, loop):
        weights, scales = trained
        operands = jax.lax.map(lambda w: numbers.make(w, AXES), weights) if make else None
        leaf = LowPrecision(operands, weights, scales, numbers)

        def layer(x, scanned):
            leaf, number = scanned
            return x + leaf.matmul(x, None, noise().layer(number)), None

        if loop:
            for number in range(layers):
                x, _ = layer(x, (jax.tree.map(lambda array, number=number: array[number], leaf), number))
        else:
            x, _ = jax.lax.scan(jax.checkpoint(layer, prevent_cse=False), x, (leaf, jnp.arange(layers)))
        return jnp.sum(x**2)

    @jax.jit
    def scanned(trained, batch):
        def add(total, x):
            return jax.tree.map(jnp.add, total, jax.grad(loss)(trained, x, True, False)), None

        return jax.lax.scan(add, jax.tree.map(jnp.zeros_like, trained), batch)[0]

    @jax.jit
    def looped(trained, batch):
        return jax.tree.map(lambda *actual: sum(actual), *(jax.grad(loss)(trained, x, False, True) for x in batch))

    actual, expected = scanned((weights, scales), batch), looped((weights, scales), batch)
    # A value near a bound between two codes may fall to the other side if sums are ordered differently.
    jax.tree.map(lambda a, b: assert_same(a, np.asarray(b), within=1e-2), actual, expected)


@pytest.mark.parametrize("numbers", [FP8, FP8_ROTATED, NVFP4_ALL], ids=["fp8", "hadamard", "nvfp4"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_one_token(numbers, dtype):
    """Generation: one row, one position, no noise."""
    x, w, _ = case()
    x = jnp.asarray(x[:1, :1], dtype)
    y = jax.jit(lambda x, w: LowPrecision(numbers.make(w, AXES), None, None, numbers).matmul(x, None, None))(
        x, jnp.asarray(w)
    )
    assert y.dtype == dtype and y.shape == (1, 1, OUT)
    assert relative(y, np.asarray(x, np.float64) @ w.T) < 0.25


def test_what_does_not_fit_is_refused():
    x, w, dy = map(jnp.asarray, case())
    for numbers in (FP8, NVFP4):
        assert numbers.misfit((32, 64)) is None
        assert numbers.misfit((3, 40, 64)) == "blocks of 16 x 16 do not divide 40 x 64"
    with pytest.raises(ValueError, match="Nvfp4Matmul has no delayed scaling"):
        LowPrecision(None, w, jnp.ones(2), NVFP4).matmul(x, None, None)
    with pytest.raises(ValueError, match="needs operands, or a weight"):
        LowPrecision(None, None, None, FP8).matmul(x, None, None)
    with pytest.raises(ValueError, match="stochastic rounding of gradients needs noise"):
        products(x, LowPrecision(None, w, None, NVFP4_ALL), dy, None)
