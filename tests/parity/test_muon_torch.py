"""Muon's updates equal torch.optim.Muon's: exactly with products in float64, otherwise within bfloat16's rounding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtune.optim.muon import muon
from jaxtune.optim.rules import Hyperparameters

torch = pytest.importorskip("torch", reason="parity needs torch, whose CPU build exists for Python 3.11 only")

UPDATES, RATE, DECAY = 10, 0.02, 0.1


def gradients(shape):
    rng = np.random.default_rng(0)
    return [np.float32(rng.standard_normal(shape)) for _ in range(UPDATES)]


def start(shape):
    return np.float32(0.1 * np.random.default_rng(1).standard_normal(shape))


def torchs(shape, nesterov, adjust_lr, dtype):
    parameter = torch.nn.Parameter(torch.tensor(start(shape), dtype=dtype))
    options = dict(lr=RATE, weight_decay=DECAY, momentum=0.95, nesterov=nesterov, adjust_lr_fn=adjust_lr)
    optimizer = torch.optim.Muon([parameter], **options)
    for gradient in gradients(shape):
        parameter.grad = torch.tensor(gradient, dtype=dtype)
        optimizer.step()
    return parameter.detach().double().numpy()


def ours(shape, nesterov, adjust_lr, dtype):
    rule = muon(0.95, nesterov, 5, adjust_lr, dtype)
    parameter = jnp.asarray(start(shape))
    state, update = rule.init(parameter), jax.jit(rule.update)
    for count, gradient in enumerate(gradients(shape)):
        at = Hyperparameters(jnp.int32(count), jnp.float32(RATE), 1.0, DECAY)
        parameter, state = update(jnp.asarray(gradient), state, parameter, at)
    return np.asarray(parameter, np.float64)


def error(found, expected, shape):
    return np.linalg.norm(found - expected) / np.linalg.norm(expected - start(shape))


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("adjust_lr", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("shape", [(32, 96), (96, 32)])
def test_updates_equal_torchs(shape, adjust_lr, nesterov, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)  # keeps torch's products in float64
    expected = torchs(shape, nesterov, adjust_lr, torch.float64)
    assert error(ours(shape, nesterov, adjust_lr, jnp.float32), expected, shape) <= 3e-6


@pytest.mark.parametrize("shape", [(32, 96), (96, 32)])
def test_with_bfloat16_products_we_are_as_close_to_exact_ones_as_torch(shape):
    exact = ours(shape, True, "original", jnp.float32)
    theirs = torchs(shape, True, "original", torch.float32)
    found = ours(shape, True, "original", jnp.bfloat16)
    assert error(found, exact, shape) <= 1.2 * error(theirs, exact, shape)
    assert error(found, theirs, shape) <= 0.02
