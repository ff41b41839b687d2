"""Inputs of layers that are trained as served in FP8 are rounded as compressed-tensors rounds them."""

import jax
import numpy as np
import pytest

from jaxtune.precision.served import round_inputs

torch = pytest.importorskip("torch", reason="parity needs torch, whose CPU build exists for Python 3.11 only")
pytest.importorskip("compressed_tensors")


def test_inputs_are_rounded_as_compressed_tensors_rounds_them():
    """By its FP8_BLOCK scheme: blocks of 128 x 128 weights, and dynamic scales of each token and 128 features."""
    from compressed_tensors.quantization import preset_name_to_scheme
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp

    x = np.random.default_rng(0).normal(size=(2, 3, 256)).astype(np.float32)
    x *= np.logspace(-4, 4, 6).reshape(2, 3, 1)  # magnitudes differ between tokens
    x[1, 1, :128] = 0
    how, value = preset_name_to_scheme("FP8_BLOCK", ["Linear"]).input_activations, torch.tensor(x)
    scales, zero_points = compute_dynamic_scales_and_zp(value, how, torch.nn.Linear(256, 128))
    expected = fake_quantize(value, scales, zero_points, how).numpy()
    np.testing.assert_allclose(jax.jit(round_inputs)(x), expected, rtol=2e-7)  # codes are equal, scales within a bit
    assert np.abs(expected - x).max() > 0


def test_gradients_ignore_the_rounding():
    x = np.linspace(-1, 1, 128, dtype=np.float32)[None]
    gradient = jax.grad(lambda x: (round_inputs(x) ** 2).sum() / 2)(x)
    np.testing.assert_array_equal(gradient, round_inputs(x))
