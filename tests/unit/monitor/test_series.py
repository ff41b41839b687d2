"""Charts of a run: every metric at its position, with its spikes however long the run is."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxtune.monitor.series import Series, series, summary, thin


def metric(values, **axes):
    return Series({"step": np.arange(1.0, len(values) + 1)} | axes, np.array(values, dtype=float))


def test_each_metric_stands_at_its_steps_tokens_and_hours():
    rows = [
        {"step": 0, "eval_loss": 5.0},
        {"step": 1, "loss": 4.0, "tokens": 100, "step_seconds": 1800},
        {"step": 2, "loss": 3.0, "tokens": 200, "step_seconds": 900, "note": "slow"},
        {"step": 2, "eval_loss": 2.0},
    ]
    metrics = series(rows)
    assert list(metrics) == ["eval_loss", "loss", "tokens", "step_seconds"]
    assert metrics["eval_loss"].values.tolist() == [5, 2]
    at = {axis: places.tolist() for axis, places in metrics["eval_loss"].at.items()}
    assert at == {"step": [0, 2], "tokens": [0, 200], "hours": [0, 0.75]}
    assert list(series([{"step": 1, "loss": 1.0}])["loss"].at) == ["step"]


def test_a_summary_is_of_all_values_and_counts_those_that_are_not_finite():
    totals = summary(metric([3, math.nan, 1, math.inf, 2]))
    assert totals == {"count": 5, "not_finite": 2, "last": [2, 5], "lowest": [1, 3], "highest": [3, 1]}
    assert "lowest" not in summary(metric([math.nan]))


@given(st.lists(st.floats(width=32), min_size=1, max_size=300), st.integers(4, 40))
def test_thinning_keeps_ends_and_extremes_and_is_bounded(values, most):
    drawn, smooth = thin(metric(values), most)
    finite = [value for value in values if math.isfinite(value)]
    drawn_values = drawn.values[np.isfinite(drawn.values)]
    assert (drawn.at["step"][0], drawn.at["step"][-1]) == (1, len(values))
    assert np.all(np.diff(drawn.at["step"]) > 0)
    assert not finite or (min(finite), max(finite)) == (drawn_values.min(), drawn_values.max())
    assert np.isfinite(drawn.values).all() == (len(finite) == len(values))
    assert len(drawn.values) <= max(most, 3 * (most // 2 + 1) + 2) and len(smooth.values) <= max(most, most // 2 + 1)


def test_what_is_smoothed_is_the_mean_of_each_stretch():
    """The mean of a stretch's lowest and highest values is not the mean of the stretch."""
    spiky = np.zeros(10_000)
    spiky[::100] = 1
    drawn, smooth = thin(metric(spiky), 200)
    assert drawn.values.mean() > 0.4 and smooth.values == pytest.approx(0.01)
    few = metric(spiky[:200])
    assert all(each is few for each in thin(few, 200))
