"""Losses and calibration of decision models against their formulas in numpy, on rows of several questions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import minimize_scalar

from jaxtune.columns import HEAD_ROWS, NOT_AN_OPTION, QUESTION_ROWS
from jaxtune.models.head.score import LabelScores
from jaxtune.objectives.decision import TEMPERATURES, decision, evaluated_decision
from jaxtune.objectives.options import DecisionOptions

# (type, target probabilities) of the questions in a row of 16 positions, each of 3 tokens.
QUESTIONS = (
    ("noul", [1.0, 0.0]),
    ("score", [0.0, 0.0, 1.0, 0.0]),
    ("choice", [0.1, 0.2, 0.7]),
    ("score", [0.25, 0.75]),
)


def row_of(questions, logits):
    """Return (scores, batch, scores of the options of each question) of a row with these questions."""
    count = len(questions)
    shares = np.full((1, 16, HEAD_ROWS), NOT_AN_OPTION, np.float32)
    last, options = np.zeros((1, 16), bool), []
    for number, (kind, label) in enumerate(questions):
        first = QUESTION_ROWS[kind].start
        shares[0, 3 * number : 3 * number + 3, first : first + len(label)] = label
        last[0, 3 * number + 2] = True
        options.append(logits[0, 3 * number + 2, first : first + len(label)].astype(np.float64))
    assert count <= 5
    return LabelScores(jnp.array(logits), {}), {"option_shares": jnp.array(shares), "last": jnp.array(last)}, options


def softmax(x):
    weights = np.exp(x - x.max())
    return weights / weights.sum()


LOGITS = np.random.default_rng(0).normal(scale=2.0, size=(1, 16, HEAD_ROWS)).astype(np.float32)
FORMULAS = {
    "cross_entropy": lambda kind, p, y: -np.sum(y * np.log(p)),
    "brier": lambda kind, p, y: np.sum((p - y) ** 2),
    "rps": lambda kind, p, y: (
        np.sum(np.cumsum(p - y)[:-1] ** 2) / (len(p) - 1) if kind == "score" else np.sum((p - y) ** 2)
    ),
}


@pytest.mark.parametrize("loss", FORMULAS)
def test_losses_of_packed_questions(one_device, loss):
    scores, batch, options = row_of(QUESTIONS, LOGITS)
    sums = decision(DecisionOptions(loss)).loss(scores, batch)
    expected = [
        FORMULAS[loss](kind, softmax(scores_), np.array(label)) for (kind, label), scores_ in zip(QUESTIONS, options)
    ]
    assert sums.weight == len(QUESTIONS)
    assert np.allclose(sums.loss, np.sum(expected), rtol=1e-5)
    brier = [np.sum((softmax(x) - np.array(y)) ** 2) for (_, y), x in zip(QUESTIONS, options)]
    chosen = [label[int(np.argmax(scores_))] for (_, label), scores_ in zip(QUESTIONS, options)]
    assert np.allclose([sums.metrics[name][0] for name in ("brier", "accuracy")], [np.sum(brier), np.sum(chosen)])


@pytest.mark.parametrize("loss", FORMULAS)
def test_only_options_of_questions_get_a_gradient(one_device, loss):
    """Positions inside a question, padding and other rows of the head get exactly none, and nothing is NaN."""
    _, batch, _ = row_of(QUESTIONS, LOGITS)
    objective = decision(DecisionOptions(loss)).loss
    gradient = np.asarray(jax.grad(lambda x: objective(LabelScores(x, {}), batch).loss)(jnp.array(LOGITS)))
    option = np.asarray((batch["option_shares"] != NOT_AN_OPTION) & batch["last"][..., None])
    assert np.isfinite(gradient).all() and (gradient[~option] == 0).all() and (gradient[option] != 0).all()
    empty = jax.tree.map(jnp.zeros_like, batch) | {"option_shares": jnp.full_like(batch["option_shares"], -1.0)}
    assert not np.asarray(jax.grad(lambda x: objective(LabelScores(x, {}), empty).loss)(jnp.array(LOGITS))).any()


def test_a_perfect_forecast_has_no_loss_and_near_levels_cost_less(one_device):
    loss = decision(DecisionOptions("rps")).loss

    def of_label(label):
        logits = np.zeros_like(LOGITS)
        logits[..., QUESTION_ROWS["score"].start] = 100.0  # certain of level 0
        scores, batch, _ = row_of([("score", np.eye(4)[label].tolist())], logits)
        return float(loss(scores, batch).loss)

    assert np.allclose([of_label(label) for label in range(4)], [0, 1 / 3, 2 / 3, 1], atol=1e-6)


def test_the_calibration_of_an_evaluation(one_device):
    """Scores that are three times too large: the temperature 3 is found, and calibrated probabilities are closer."""
    rng, sums = np.random.default_rng(1), []
    confidences, hits, kept, labels = [], [], [], []
    objective = evaluated_decision(DecisionOptions("cross_entropy"))
    step = jax.jit(objective.loss)
    for _ in range(200):
        logits = rng.normal(scale=1.0, size=(1, 16, HEAD_ROWS)).astype(np.float32)
        questions = []
        for number in range(5):
            first = QUESTION_ROWS["choice"].start
            p = softmax(logits[0, 3 * number + 2, first : first + 3].astype(np.float64))
            questions.append(("choice", np.eye(3)[rng.choice(3, p=p)].tolist()))
        scores, batch, options = row_of(questions, 3 * logits)
        sums.append(jax.device_get(step(scores, batch)))
        for (_, label), scores_ in zip(questions, options):
            confidences.append(softmax(scores_).max())
            hits.append(label[int(np.argmax(scores_))])
            kept.append(scores_)
            labels.append(label)
    total = jax.tree.map(lambda *values: sum(np.asarray(value, np.float64) for value in values), *sums)
    found = objective.summarise(total.metrics)
    bins = np.minimum((np.array(confidences) * 15).astype(int), 14)
    excess = np.bincount(bins, np.array(confidences) - np.array(hits), 15)
    assert np.isclose(found["ece"], np.abs(excess).sum() / len(hits), atol=1e-3)

    def cross_entropy(temperature):
        return -sum(np.log(softmax(x / temperature)) @ np.array(y) for x, y in zip(kept, labels))

    best = minimize_scalar(cross_entropy, bounds=(0.2, 8), method="bounded").x
    assert abs(np.log2(found["temperature_choice"] / best)) <= 1 / 16 + 1e-3  # the nearest of the temperatures
    assert 2.4 <= found["temperature_choice"] <= 3.6 and found["ece_calibrated"] < found["ece"] / 2
    assert "temperature_noul" not in found and found["temperature_choice"] in TEMPERATURES
