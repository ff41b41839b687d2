"""Learning rates: equal to transformers' where it has the same schedule, and to their definition elsewhere."""

import numpy as np
import pytest

from jaxtune.config.schema import Optim
from jaxtune.optim.schedules import learning_rate

TOTAL, WARMUP, PEAK = 100, 10, 3e-4


def rates(**options):
    rate = learning_rate(Optim(learning_rate=PEAK, **options), TOTAL)
    return np.array([float(rate(step)) for step in range(TOTAL + 1)])


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"schedule": "linear"}, ("linear", {})),
        ({"schedule": "cosine"}, ("cosine", {})),
        ({"schedule": "cosine_with_restarts", "cycles": 3}, ("cosine_with_restarts", {"num_cycles": 3})),
        ({"schedule": "constant"}, ("constant_with_warmup", {})),
        ({"schedule": "inverse_sqrt"}, ("inverse_sqrt", {})),
        ({"schedule": "polynomial", "power": 2.0}, ("polynomial", {"power": 2.0, "lr_end": 0.0})),
        (
            {"schedule": "cosine", "final_lr_fraction": 0.1},
            ("cosine_with_min_lr", {"min_lr_rate": 0.1}),
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_equals_transformers(ours, theirs):
    torch = pytest.importorskip("torch", reason="transformers' schedulers need torch (Python 3.11 here)")
    import transformers

    name, options = theirs
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    scheduler = transformers.get_scheduler(name, optimizer, WARMUP, TOTAL, scheduler_specific_kwargs=options)
    expected = []
    for _ in range(TOTAL + 1):
        expected.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    np.testing.assert_allclose(rates(warmup_steps=WARMUP, **ours), expected, rtol=2e-5, atol=1e-10)


def test_wsd_is_flat_and_then_cools_down():
    found = rates(schedule="wsd", warmup_steps=WARMUP, cooldown_steps=20, final_lr_fraction=0.1)
    np.testing.assert_allclose(found[WARMUP:81], PEAK, rtol=1e-6)
    np.testing.assert_allclose(found[90], PEAK * 0.55, rtol=1e-5)
    np.testing.assert_allclose(found[100], PEAK * 0.1, rtol=1e-5)


def test_a_ratio_is_steps():
    np.testing.assert_array_equal(rates(warmup_ratio=0.1), rates(warmup_steps=10))


@pytest.mark.parametrize("schedule", ["linear", "cosine", "polynomial"])
def test_the_final_fraction_is_reached(schedule):
    np.testing.assert_allclose(rates(schedule=schedule, final_lr_fraction=0.2)[-1], PEAK * 0.2, rtol=1e-5)
