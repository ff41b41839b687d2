"""Each rule makes the published updates, written here in float64, and trains a small model."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

from jaxtune.optim import rules
from jaxtune.optim.muon import muon, normuon
from jaxtune.optim.orthogonalize import orthogonalize
from jaxtune.optim.rules import Hyperparameters, Rule

UPDATES = 12
BETA1, BETA2, EPSILON = 0.9, 0.95, 1e-8


def descend(parameter, direction, rate, decay):
    return parameter - rate * (direction + decay * parameter)


def adamw(gradients, parameter, rates, decay):
    """Loshchilov & Hutter 2019, algorithm 2."""
    mean = square = 0.0
    for step, (gradient, rate) in enumerate(zip(gradients, rates, strict=True), start=1):
        mean = BETA1 * mean + (1 - BETA1) * gradient
        square = BETA2 * square + (1 - BETA2) * gradient**2
        direction = (mean / (1 - BETA1**step)) / (np.sqrt(square / (1 - BETA2**step)) + EPSILON)
        parameter = descend(parameter, direction, rate, decay)
    return parameter


def sgdw(momentum):
    """Loshchilov & Hutter 2019, algorithm 1, with the rate outside the momentum, as in torch."""

    def train(gradients, parameter, rates, decay):
        velocity = 0.0
        for gradient, rate in zip(gradients, rates, strict=True):
            velocity = momentum * velocity + gradient
            parameter = descend(parameter, velocity, rate, decay)
        return parameter

    return train


def lion(gradients, parameter, rates, decay):
    """Chen et al. 2023, algorithm 2."""
    mean = 0.0
    for gradient, rate in zip(gradients, rates, strict=True):
        parameter = descend(parameter, np.sign(BETA1 * mean + (1 - BETA1) * gradient), rate, decay)
        mean = BETA2 * mean + (1 - BETA2) * gradient
    return parameter


def adafactor(gradients, parameter, rates, decay):
    """Shazeer & Stern 2018, algorithms 4 (matrices) and 5 (vectors, and here small matrices), absolute steps."""
    factored = parameter.ndim == 2 and min(parameter.shape) >= 128
    rows = columns = whole = 0.0
    for step, (gradient, rate) in enumerate(zip(gradients, rates, strict=True), start=1):
        beta, square = 1 - step**-0.8, gradient**2 + 1e-30
        if factored:
            rows = beta * rows + (1 - beta) * square.sum(1)
            columns = beta * columns + (1 - beta) * square.sum(0)
            estimate = np.outer(rows, columns) / rows.sum()
        else:
            estimate = whole = beta * whole + (1 - beta) * square
        direction = gradient / np.sqrt(estimate)
        direction = direction / max(1.0, np.sqrt(np.mean(direction**2)))
        parameter = descend(parameter, direction, rate, decay)
    return parameter


def schedule_free(gradients, parameter, rates, decay):
    """Defazio et al. 2024, algorithm 1: return its average, weighted by the square of the largest rate so far."""
    x = z = parameter
    square = weights = largest = 0.0
    for step, (gradient, rate) in enumerate(zip(gradients, rates, strict=True), start=1):
        y = (1 - BETA1) * z + BETA1 * x
        square = BETA2 * square + (1 - BETA2) * gradient**2
        direction = gradient / (np.sqrt(square / (1 - BETA2**step)) + EPSILON)
        z = z - rate * (direction + decay * y)
        largest = np.maximum(largest, rate)
        weights = weights + largest**2
        x = x + largest**2 / (weights or 1.0) * (z - x)  # the first rate is 0
    return x


def newton_schulz(matrix):
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix / np.linalg.norm(matrix)
    for _ in range(5):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def muon_reference(nesterov, factor):
    """Jordan et al. 2024."""

    def train(gradients, parameter, rates, decay):
        mean = np.zeros_like(parameter)
        for gradient, rate in zip(gradients, rates, strict=True):
            mean = 0.95 * mean + gradient
            ahead = gradient + 0.95 * mean if nesterov else mean
            parameter = descend(parameter, factor(*parameter.shape) * newton_schulz(ahead), rate, decay)
        return parameter

    return train


def normuon_reference(cautious):
    """Li et al. 2025, algorithm 1; Chen et al. 2025 for the decay."""

    def train(gradients, parameter, rates, decay):
        mean, row = np.zeros_like(parameter), np.zeros((len(parameter), 1))
        for gradient, rate in zip(gradients, rates, strict=True):
            mean = 0.95 * mean + 0.05 * gradient
            orthogonal = newton_schulz(mean)
            row = 0.9 * row + 0.1 * np.mean(orthogonal**2, axis=1, keepdims=True)
            normal = orthogonal / np.sqrt(row)
            direction = 0.2 * np.sqrt(normal.size) / np.linalg.norm(normal) * normal
            mask = direction * parameter >= 0 if cautious else 1.0
            parameter = descend(parameter, direction, rate, decay * mask)
        return parameter

    return train


def muon32(nesterov=True, adjust_lr="original"):
    return muon(0.95, nesterov, 5, adjust_lr, dtype=jnp.float32)


CASES = {
    "adamw": (rules.adamw(BETA1, BETA2, EPSILON), adamw, (9, 7)),
    "sgd": (rules.sgd(0.0), sgdw(0.0), (9, 7)),
    "sgd, momentum": (rules.sgd(0.9), sgdw(0.9), (9, 7)),
    "lion": (rules.lion(BETA1, BETA2), lion, (9, 7)),
    "adafactor, factored": (rules.adafactor(), adafactor, (130, 150)),
    "adafactor, factored, tall": (rules.adafactor(), adafactor, (150, 130)),
    "adafactor, small": (rules.adafactor(), adafactor, (9, 7)),
    "adafactor, vector": (rules.adafactor(), adafactor, (9,)),
    "schedule_free": (rules.schedule_free(BETA1, BETA2, EPSILON), schedule_free, (9, 7)),
    "muon": (muon32(), muon_reference(True, lambda o, i: max(1, o / i) ** 0.5), (9, 16)),
    "muon, tall": (muon32(), muon_reference(True, lambda o, i: max(1, o / i) ** 0.5), (16, 9)),
    "muon, heavy ball": (muon32(nesterov=False), muon_reference(False, lambda o, i: max(1, o / i) ** 0.5), (16, 9)),
    "muon, as AdamW": (
        muon32(adjust_lr="match_rms_adamw"),
        muon_reference(True, lambda o, i: 0.2 * max(o, i) ** 0.5),
        (9, 16),
    ),
    "normuon": (normuon(0.95, 0.9, 5, False, dtype=jnp.float32), normuon_reference(False), (9, 16)),
    "normuon, cautious": (normuon(0.95, 0.9, 5, True, dtype=jnp.float32), normuon_reference(True), (16, 9)),
}


def run(rule: Rule, gradients, parameter, rates, multiplier=1.0, decay=0.0):
    """Return the parameter after these gradients."""
    update = jax.jit(lambda *arguments: rule.update(*arguments[:3], Hyperparameters(*arguments[3:], multiplier, decay)))
    parameter = jnp.asarray(parameter, jnp.float32)
    state = rule.init(parameter)
    for count, (gradient, rate) in enumerate(zip(gradients, rates, strict=True)):
        parameter, state = update(jnp.float32(gradient), state, parameter, jnp.int32(count), jnp.float32(rate))
    return np.asarray(parameter)


def material(shape, seed=0):
    """Draw gradients, a parameter, and rates that warm up from 0 and decay; float32 values in float64."""
    rng = np.random.default_rng(seed)
    gradients = [np.float64(np.float32(rng.standard_normal(shape))) for _ in range(UPDATES)]
    rates = np.float64(np.float32(0.03 * np.interp(np.arange(UPDATES), [0, 4, UPDATES], [0, 1, 0.2])))
    return gradients, np.float64(np.float32(0.1 * rng.standard_normal(shape))), rates


@pytest.mark.parametrize("name", CASES)
def test_updates_are_the_published_ones(name):
    rule, reference, shape = CASES[name]
    gradients, parameter, rates = material(shape)
    expected = reference(gradients, parameter, 0.5 * rates, 0.1)
    updated = run(rule, gradients, parameter, rates, 0.5, 0.1)
    moved = np.abs(expected - parameter).max()
    assert np.abs(updated - expected).max() <= 3e-6 * moved


@pytest.mark.parametrize("name", ["adamw", "schedule_free", "muon, tall", "normuon, cautious"])
def test_a_stack_is_updated_layer_by_layer_with_the_rates_and_decays_of_each(name):
    rule, _, shape = CASES[name]
    gradients, parameter, rates = material((2, *shape))
    multiplier, decay = np.float32([0.5, 1.0]), np.float32([0.0, 0.2])
    updated = run(rule, gradients, parameter, rates, multiplier[:, None, None], decay[:, None, None])
    for layer in range(2):
        single = run(rule, [g[layer] for g in gradients], parameter[layer], rates, multiplier[layer], decay[layer])
        assert np.abs(updated[layer] - single).max() <= 2e-6


@pytest.mark.parametrize("adjust_lr", ["original", "match_rms_adamw"])
def test_muon_without_nesterov_is_that_of_optax(adjust_lr):
    """optax multiplies by (in, out) weights; its Nesterov corrects for the start from zero, and torch's does not."""
    gradients, parameter, rates = material((16, 9))
    updated = run(muon32(False, adjust_lr), gradients, parameter, rates)
    rms = 0.2 if adjust_lr == "match_rms_adamw" else None
    theirs = optax.contrib.muon(lambda count: jnp.asarray(rates)[count], nesterov=False, consistent_rms=rms)
    expected = jnp.asarray(parameter.T, jnp.float32)
    state, update = theirs.init(expected), jax.jit(theirs.update)
    for gradient in gradients:
        change, state = update(jnp.float32(gradient.T), state, expected)
        expected = expected + change
    assert np.abs(updated - expected.T).max() <= 2e-6


def test_schedule_free_takes_the_gradient_between_the_average_and_the_base():
    rule = rules.schedule_free(0.75, BETA2, EPSILON)
    parameter = jnp.ones((3,))
    state = rule.init(parameter)
    assert (rule.point(parameter, state) == parameter).all()
    parameter, state = rule.update(
        jnp.ones((3,)), state, parameter, Hyperparameters(jnp.int32(0), jnp.float32(0.1), 1.0, 0.0)
    )
    parameter, state = rule.update(
        jnp.ones((3,)), state, parameter, Hyperparameters(jnp.int32(1), jnp.float32(0.1), 1.0, 0.0)
    )
    np.testing.assert_allclose(state["z"], 0.8, rtol=1e-6)
    np.testing.assert_allclose(parameter, 0.85, rtol=1e-6)
    np.testing.assert_allclose(rule.point(parameter, state), 0.25 * 0.8 + 0.75 * 0.85, rtol=1e-6)
    with pytest.raises(ValueError, match="beta1 > 0"):
        rules.schedule_free(0.0, BETA2, EPSILON)


def test_states_hold_no_more_than_the_rule_needs():
    def sizes(rule, shape):
        return {name: value.shape for name, value in jax.eval_shape(rule.init, jnp.zeros(shape)).items()}

    assert sizes(rules.sgd(0.0), (4, 3)) == {}
    assert sizes(rules.adafactor(), (256, 128)) == {"row": (128,), "column": (256,)}
    assert sizes(rules.adafactor(), (256, 127)) == {"whole": (256, 127)}
    assert sizes(normuon(0.95, 0.95, 5, True), (2, 4, 3)) == {"momentum": (2, 4, 3), "row": (2, 4)}


def test_orthogonal_matrices_are_close_to_those_of_the_singular_vectors():
    """bfloat16 products: within 3% of the same iterations in float64, singular values around 1."""
    matrices = np.random.default_rng(0).standard_normal((2, 48, 128))
    orthogonal = np.asarray(orthogonalize(jnp.float32(matrices)), np.float64)
    for one, matrix in zip(orthogonal, matrices, strict=True):
        expected = newton_schulz(matrix)
        assert np.linalg.norm(one - expected) <= 0.03 * np.linalg.norm(expected)
        left, _, right = np.linalg.svd(matrix, full_matrices=False)
        singular = np.diag(left.T @ one @ right.T)
        assert singular.min() > 0.6 and singular.max() < 1.25


def test_matrices_of_a_stack_are_as_close_in_bfloat16_as_one_alone():
    """On a CPU, XLA leaves out the rounding of one use of a product if both uses are in float32."""
    stack = jnp.asarray(np.random.default_rng(0).standard_normal((4, 96, 32)), jnp.bfloat16)
    exact = np.asarray(orthogonalize(stack.astype(jnp.float32), dtype=jnp.float32))
    together = jax.jit(orthogonalize)(stack)
    alone = jnp.stack([jax.jit(orthogonalize)(matrix[None])[0] for matrix in stack])
    assert np.linalg.norm(together - exact) <= 1.2 * np.linalg.norm(alone - exact)


def test_orthogonalization_of_zeros_is_zero():
    assert not np.asarray(orthogonalize(jnp.zeros((2, 8, 16)))).any()


CONVERGENCE = {
    "adamw": (rules.adamw(0.9, 0.99, 1e-8), 0.05),
    "sgd": (rules.sgd(0.9), 0.1),
    "lion": (rules.lion(0.9, 0.99), 0.05),
    "adafactor": (rules.adafactor(), 0.05),
    "schedule_free": (rules.schedule_free(0.9, 0.99, 1e-8), 0.1),
    "muon": (muon(0.95, True, 5, "original"), 0.1),
    "normuon": (normuon(0.95, 0.95, 5, True), 0.1),
}


@pytest.mark.parametrize("name", CONVERGENCE)
def test_a_regression_is_learned(name):
    """Y = W X, 12 x 8, from zero: the loss falls by a factor of 1000 in 200 steps of a linear schedule."""
    rule, peak = CONVERGENCE[name]
    rng = np.random.default_rng(0)
    inputs, truth = jnp.float32(rng.standard_normal((8, 64))), jnp.float32(rng.standard_normal((12, 8)))

    def loss(weight):
        return jnp.mean((weight @ inputs - truth @ inputs) ** 2)

    def step(carry, count):
        weight, state = carry
        gradient = jax.grad(loss)(rule.point(weight, state))
        rate = jnp.float32(peak) * (1 - count / 200)
        return rule.update(gradient, state, weight, Hyperparameters(count, rate, 1.0, 0.0)), None

    start = jnp.zeros((12, 8))
    (weight, _), _ = jax.lax.scan(step, (start, rule.init(start)), jnp.arange(200))
    assert loss(weight) < 1e-3 * loss(start)
