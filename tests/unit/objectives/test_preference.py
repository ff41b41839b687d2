"""Effects of preference options on the loss of one row with two pairs; the losses themselves: tests/parity."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_expit

from jaxtune.models.head.score import Scores
from jaxtune.objectives.options import PreferenceOptions
from jaxtune.objectives.preference import preference

SEGMENTS = np.array([[1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4, 0, 0, 0, 0]])
WEIGHT = np.array([[0, 1, 0, 0, 1, 0, 1, 1, 0, 0, 1, 0, 0, 0, 0, 0]], np.float32)
MODEL, REFERENCE = (-np.random.default_rng(seed).exponential(1.0, WEIGHT.shape).astype(np.float32) for seed in (0, 1))
GAINED = [[(MODEL - REFERENCE) * WEIGHT @ (SEGMENTS[0] == number) for number in pair] for pair in ((1, 2), (3, 4))]
MARGINS = np.array([chosen - rejected for chosen, rejected in GAINED]).ravel()


def loss_of(options: PreferenceOptions, mesh, reference=REFERENCE) -> float:
    batch = {"segment_ids": jnp.array(SEGMENTS), "loss_weight": jnp.array(WEIGHT)}
    model, of_reference = jnp.array(MODEL), jnp.array(reference)
    objective = preference(options)
    sums = objective.loss(Scores(model, -model * WEIGHT, {}, of_reference if objective.reference else None), batch)
    assert sums.weight == 2
    return float(sums.loss) / 2


def test_weights_of_both_losses(one_device):
    of_pairs = loss_of(PreferenceOptions("sigmoid"), one_device)
    answers = -np.sum(MODEL * WEIGHT * np.isin(SEGMENTS, (1, 3))) / 3  # three tokens of chosen answers
    weighted = loss_of(PreferenceOptions("sigmoid", loss_weight=0.5, sft_weight=2.0), one_device)
    assert abs(weighted - (0.5 * of_pairs + 2 * answers)) <= 1e-5


def test_smoothed_labels(one_device):
    expected = -np.mean(0.8 * log_expit(0.1 * MARGINS) + 0.2 * log_expit(-0.1 * MARGINS))
    assert abs(loss_of(PreferenceOptions("sigmoid", label_smoothing=0.2), one_device) - expected) <= 1e-6


def test_without_a_reference_log_probabilities_are_compared(one_device):
    options = PreferenceOptions("sigmoid", reference=None)
    assert not preference(options).reference
    assert abs(loss_of(options, one_device) - loss_of(PreferenceOptions("sigmoid"), one_device, 0 * REFERENCE)) <= 1e-6


@pytest.mark.parametrize("name", ["orpo", "exo_pair", "simpo", "kto_pair"])
def test_a_row_without_pairs_has_no_gradient(one_device, name):
    """No NaN either: on padding a log-probability is 0."""
    batch = {"segment_ids": jnp.zeros((1, 16), jnp.int32), "loss_weight": jnp.zeros((1, 16))}
    objective = preference(PreferenceOptions(name, label_smoothing=0.1 if name == "exo_pair" else 0.0))

    def loss(x):
        reference = jnp.zeros((1, 16)) if objective.reference else None
        return objective.loss(Scores(x, -x * batch["loss_weight"], {}, reference), batch).loss

    value, gradient = jax.value_and_grad(loss)(jnp.zeros((1, 16)))
    assert value == 0 and not gradient.any()
