"""NVFP4: its products, and its stochastic rounding."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxtune.parallel.layout import by_token
from jaxtune.parallel.random import Noise
from jaxtune.precision import nvfp4
from jaxtune.precision.hadamard import SIGNED, rotate_blocks
from jaxtune.precision.matmul import LowPrecision
from jaxtune.precision.nvfp4 import Nvfp4Matmul, stochastic_e2m1
from jaxtune.precision.operands import by_feature
from unit.precision.reference import (
    AXES,
    E2M1,
    INNER,
    LENGTH,
    NVFP4_ALL,
    OUT,
    ROWS,
    assert_same,
    case,
    in_nvfp4,
    noise,
    products,
    relative,
)

pytestmark = pytest.mark.usefixtures("one_device")


def test_an_element_times_the_scale_of_its_block_is_exact_in_bfloat16():
    """Therefore a bfloat16 product, summed in float32, equals NVFP4's own."""
    scales = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    values = np.multiply.outer(E2M1, scales)
    assert np.array_equal(values.astype(ml_dtypes.bfloat16).astype(np.float64), values)


def test_stochastic_rounding_goes_to_a_neighbour_and_is_unbiased():
    x = np.concatenate([np.linspace(-6, 6, 97), [1e-3, -1e-3]]).astype(np.float32)
    draws = 2**12
    uniform = (np.arange(draws, dtype=np.float32)[:, None] + 0.5) / draws
    codes = np.asarray(jax.jit(stochastic_e2m1)(jnp.broadcast_to(x, (draws, len(x))), jnp.asarray(uniform)))
    values = np.where(codes & 8, -1, 1) * E2M1[codes & 7]
    below = E2M1[np.searchsorted(E2M1, np.abs(x), side="right") - 1]
    above = E2M1[np.searchsorted(E2M1, np.abs(x))]
    assert ((np.abs(values) == below) | (np.abs(values) == above)).all()
    assert np.abs(values.mean(axis=0) - x).max() <= 1 / draws


@pytest.mark.parametrize(("hadamard", "length"), [(False, 16), (True, 16), (True, 24), (True, 2)])
def test_stochastic_gradients_are_unbiased(hadamard, length):
    """The mean of dx and dW over many keys equals the product with an unrounded dy."""
    x, w, dy = case(length=length)
    numbers, keys = Nvfp4Matmul(True, hadamard, False), 256

    @jax.jit
    def gradients(x, w, dy):
        def one(key):
            leaf = lambda w: LowPrecision(None, w, None, numbers)  # noqa: E731
            backward = jax.vjp(lambda x, w: leaf(w).matmul(x, None, Noise(key, noise().rows)), x, w)[1]
            return backward(dy)

        return jax.lax.map(one, jax.random.split(jax.random.key(0), keys))

    dx, dw = (np.asarray(draws, np.float64) for draws in gradients(x, w, jax.device_put(dy, by_token())))
    weight, left, right = in_nvfp4(w, rows=16), by_feature(jnp.asarray(dy)), by_feature(jnp.asarray(x))
    if hadamard:
        left, right = rotate_blocks(left, SIGNED), rotate_blocks(right, SIGNED)
    for draws, expected in ((dx, dy @ weight), (dw, np.asarray(left) @ in_nvfp4(np.asarray(right)).T)):
        once = relative(draws[0], expected)
        assert 0.05 < once < 0.3
        # The error of a mean of independent draws; a bias would stay.
        assert relative(draws.mean(axis=0), expected) < 1.3 * once / np.sqrt(keys)
        assert relative(draws.mean(axis=0), expected) > 0.5 * once / np.sqrt(keys)


def test_random_bits_are_those_of_the_row_and_of_the_place():
    first, second = NVFP4_ALL.random(noise(), (ROWS, LENGTH, OUT))
    assert not np.array_equal(first, second)
    swapped = Noise(noise().key, noise().rows[::-1])
    assert np.array_equal(NVFP4_ALL.random(swapped, (ROWS, LENGTH, OUT))[0], first[::-1])
    assert not np.array_equal(NVFP4_ALL.random(noise(1), (ROWS, LENGTH, OUT))[0], first)


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="jax.nn.scaled_matmul runs on a CPU from jax 0.12 on")
def test_what_a_blackwell_gpu_is_asked_for_is_what_is_computed_elsewhere(monkeypatch):
    """XLA's own implementation of the product on a CPU; tests/gpu covers GPUs."""
    x, w, dy = case()
    run = lambda: products(x, LowPrecision(None, jnp.asarray(w), None, NVFP4_ALL), dy, noise())[:3]  # noqa: E731
    expected = run()
    monkeypatch.setattr(nvfp4, "native", lambda device: True)
    jax.clear_caches()
    operands = NVFP4_ALL.make(jnp.asarray(w), AXES)
    assert operands.backward.codes.shape == (INNER, OUT // 2)
    for native, emulated in zip(run(), expected):
        assert_same(native, np.asarray(emulated))
    jax.clear_caches()
