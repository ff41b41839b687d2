"""Loss spikes are seen and change nothing; the learning rate halves and recovers; checkpoints have the level."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtune.config import checks
from jaxtune.config.schema import CkptOptions, Config, GuardOptions
from jaxtune.objectives.objective import Sums
from jaxtune.optim.build import Trained, build
from jaxtune.optim.options import OptimOptions
from jaxtune.precision.recipes import RECIPES
from jaxtune.training.guard import first_level, level_after
from jaxtune.training.state import initial_state
from jaxtune.training.step import GradientSums, StepOptions, make_train_step


def run(losses, norms, options: GuardOptions):
    """Run gradient descent with these losses and gradients; return (change of the parameter, metrics) by step."""
    optim = OptimOptions("sgd", learning_rate=1.0, weight_decay=0.0, beta1=0.0)
    optimizer = build(optim, {"w": Trained(("model.norm.weight",))}, 1)

    def gradients(trained, frozen, batch, step, *_):
        return GradientSums({"w": jnp.asarray(norms)[step][None]}, Sums(jnp.asarray(losses)[step], jnp.int32(1)))

    step = jax.jit(make_train_step(gradients, optimizer, RECIPES["fp32"], StepOptions(guard=options)))
    state = initial_state(optimizer, {"w": jnp.zeros(1)})._replace(guard=first_level())
    batch, values, rows = {"segment_ids": jnp.ones((1, 1, 1), jnp.int32)}, [0.0], []
    for _ in losses:
        state, metrics = step(state, {}, batch, jnp.float32(1.0))
        values.append(float(state.trained["w"][0]))
        rows.append({name: float(value) for name, value in metrics.items()})
    return np.diff(values), rows


def test_a_spike_changes_nothing_and_is_not_counted():
    losses = np.array([2.0, 2.1, 1.9, 2.0, 9.0, 2.0, 2.05, 9.0, 2.0], np.float32)
    norms = np.array([1.0, 1.0, 1.0, 1.0, 1.0, 30.0, 1.0, 1.0, 1.0], np.float32)
    moved, metrics = run(losses, norms, GuardOptions("skip", window=4))
    assert [row["spike"] for row in metrics] == [0, 0, 0, 0, 1, 1, 0, 1, 0]
    np.testing.assert_allclose(moved, [-1, -1, -1, -1, 0, 0, -1, 0, -1])
    assert all(row["rate_factor"] == 1 for row in metrics)


def test_what_is_not_finite_is_no_spike_and_neither_is_the_first_gradient():
    losses, norms = np.full(9, 2.0, np.float32), np.zeros(9, np.float32)
    losses[4], norms[5], norms[6], norms[8] = np.inf, np.inf, 1.0, 1.0
    moved, metrics = run(losses, norms, GuardOptions("lower_rate", window=3))
    assert not any(row["spike"] for row in metrics) and all(row["rate_factor"] == 1 for row in metrics)
    np.testing.assert_allclose(moved, [0, 0, 0, 0, 0, 0, -1, 0, -1])


def test_where_losses_stay_the_level_follows():
    losses = np.concatenate([2 + 0.1 * np.cos(np.arange(8)), np.full(12, 9.0)]).astype(np.float32)
    _, metrics = run(losses, np.ones(20, np.float32), GuardOptions("skip", window=8))
    spikes = [number for number, row in enumerate(metrics) if row["spike"]]
    assert spikes == list(range(8, 8 + len(spikes))) and 1 < len(spikes) < 8


def test_no_step_is_a_spike_before_the_window_is_full():
    moved, metrics = run(
        np.array([2.0, 900.0, 2.0], np.float32), np.ones(3, np.float32), GuardOptions("skip", window=3)
    )
    assert moved.all() and not any(row["spike"] for row in metrics)


def test_the_rate_halves_at_a_spike_and_is_back_after_the_window():
    losses = np.array([2.0, 2.1, 1.9, 2.0, 9.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0], np.float32)
    moved, metrics = run(losses, np.ones(len(losses), np.float32), GuardOptions("lower_rate", window=4))
    assert moved[4] == 0 and moved[3] == -1
    np.testing.assert_allclose(-moved[5:10], 0.5 * 2 ** (np.arange(5) / 4), rtol=1e-6)
    np.testing.assert_allclose(moved[10], -1, rtol=1e-6)
    np.testing.assert_allclose([row["rate_factor"] for row in metrics][5:10], -moved[5:10], rtol=1e-6)


def test_means_are_those_of_numpy():
    rng = np.random.default_rng(0)
    losses, level = rng.normal(3, 0.1, 20).astype(np.float32), first_level()
    options = GuardOptions("skip", window=50)
    for loss in losses:
        level = level_after(level, jnp.float32(loss), jnp.float32(2 * loss), jnp.bool_(True), options)
    np.testing.assert_allclose(level.loss, losses.mean(), rtol=1e-5)
    np.testing.assert_allclose(level.variance, losses.var(), rtol=1e-3)
    np.testing.assert_allclose(level.norm, 2 * losses.mean(), rtol=1e-5)


@pytest.mark.parametrize(
    ("ckpt", "key"),
    [(CkptOptions(save_optimizer=False), "ckpt.save_optimizer"), (CkptOptions(save_steps=0), "ckpt.save_steps")],
)
def test_what_rolls_back_needs_checkpoints(ckpt, key):
    assert any(
        problem.text.startswith(key) for problem in checks.check(Config(guard=GuardOptions("roll_back"), ckpt=ckpt))
    )
