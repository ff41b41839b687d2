"""The best evaluation, and early stopping, as decided by transformers' trainer and callback."""

import dataclasses
import math
import random
from types import SimpleNamespace

import pytest
from transformers import EarlyStoppingCallback, TrainerControl, TrainerState

from jaxtune.config.schema import EvalOptions
from jaxtune.errors import UserError
from jaxtune.run.best import BestTracker


def by_transformers(values: list[float], patience: int, threshold: float, larger: bool) -> tuple[int, int]:
    """Return (number of evaluations until the run ends, number of the best one, counted from 1)."""
    callback, state, control = EarlyStoppingCallback(patience, threshold), TrainerState(), TrainerControl()
    arguments = SimpleNamespace(metric_for_best_model="eval_loss", greater_is_better=larger)
    best = 0
    for number, value in enumerate(values, start=1):
        callback.on_evaluate(arguments, state, control, metrics={"eval_loss": value})  # pyright: ignore
        # As in Trainer._determine_best_metric.
        if state.best_metric is None or (value > state.best_metric if larger else value < state.best_metric):
            state.best_metric, best = value, number
        if control.should_training_stop:
            return number, best
    return len(values), best


@pytest.mark.parametrize("larger", [False, True])
@pytest.mark.parametrize("threshold", [0.0, 0.2])
def test_as_transformers_decides(larger, threshold):
    rng = random.Random(0)
    for _ in range(50):
        values = [rng.choice([0.1, 0.5, 0.9]) + 0.3 * rng.random() for _ in range(12)]
        options = EvalOptions(patience=3, min_improvement=threshold, larger_is_better=larger)
        standing, number = BestTracker(), 0
        for number, value in enumerate(values, start=1):
            standing = standing.after(number, {"eval_loss": value}, options)
            if standing.ending(options):
                break
        assert (number, standing.step) == by_transformers(values, 3, threshold, larger)


def test_a_standing_is_what_it_was_saved_as():
    standing = BestTracker().after(3, {"eval_loss": 0.1 + 0.2}, EvalOptions())
    assert BestTracker(**dataclasses.asdict(standing)) == standing == BestTracker(3, 0.1 + 0.2, 0)


def test_what_is_not_a_number_is_no_better():
    options = EvalOptions(patience=2)
    standing = BestTracker().after(1, {"eval_loss": math.nan}, options)
    assert standing.step is None and not standing.ending(options)
    assert "2 evaluations (eval.patience) were no better" in standing.after(2, {"eval_loss": math.nan}, options).ending(
        options
    )
    assert standing.after(2, {"eval_loss": 1.0}, options) == BestTracker(2, 1.0)
    assert BestTracker(2, 1.0).after(3, {"eval_loss": math.nan}, options) == BestTracker(2, 1.0, 1)


@pytest.mark.parametrize(
    "metric, target, value, ends",
    [
        ("eval_loss", 0.5, 0.4, True),
        ("eval_loss", 0.5, 0.6, False),
        ("eval_code_perplexity", 2.0, 1.9, True),
        ("eval_token_accuracy", 0.5, 0.6, True),
        ("eval_reward", 0.5, 0.4, False),
    ],
)
def test_a_target_is_reached_from_the_right_side(metric, target, value, ends):
    options = EvalOptions(best_metric=metric, target=target)
    assert bool(BestTracker().after(1, {metric: value}, options).ending(options)) == ends


def test_a_metric_that_is_not_there():
    with pytest.raises(UserError, match="eval.best_metric='eval_los': an evaluation has eval_loss"):
        BestTracker().after(1, {"eval_loss": 1.0}, EvalOptions(best_metric="eval_los"))
