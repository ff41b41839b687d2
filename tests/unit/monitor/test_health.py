"""A run that does not learn warns once; a run that learns does not warn."""

import pytest

from jaxtune.monitor.health import IN_A_ROW, Health


def notices(rows, optimizer="adamw"):
    health = Health(optimizer)
    keys = "loss", "grad_norm", "learning_rate"
    return [line for row in rows for line in health.notice(dict(zip(keys, row)))]


def test_a_run_that_learns_is_not_disturbed():
    assert notices([(3.0 - 0.01 * i, 1.0, 1e-3) for i in range(30)]) == []
    assert notices([(3.0, 1.0, 0.0)] * 3 + [(3.0 - i, 1.0, 1e-3) for i in range(9)]) == []  # warm-up from 0
    assert notices([(3.0, 0.0, 1e-3)] * (IN_A_ROW - 1) + [(2.0, 1.0, 1e-3)]) == []


def test_a_frozen_run_is_noticed():
    """Saturated logits: the loss equals a uniform guess's, and its gradient is 0."""
    lines = notices([(5.55, 0.0, 1e-3)] * 20)
    assert len(lines) == 2 and "gradient is 0 in 5 steps" in lines[0] and "loss is 5.55 to the last digit" in lines[1]


@pytest.mark.parametrize(("optimizer", "count"), [("adamw", 1), ("sgd", 0)])
def test_an_absurd_learning_rate_is_noticed_where_it_is_the_size_of_an_update(optimizer, count):
    lines = notices([(float(i), 1.0, 1e6) for i in range(9)], optimizer)
    assert len(lines) == count and all("learning rate of 1e+06" in line for line in lines)
