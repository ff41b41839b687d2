"""Learning rates equal transformers' if it has the same schedule, and their definition otherwise."""

import re

import numpy as np
import pytest

from jaxtune.errors import UserError
from jaxtune.optim.options import OptimOptions
from jaxtune.optim.schedules import check_length, learning_rate

TOTAL, WARMUP, PEAK = 100, 10, 3e-4


def rates(**options):
    rate = learning_rate(OptimOptions(learning_rate=PEAK, **options), TOTAL)
    return np.array([float(rate(step)) for step in range(TOTAL + 1)])


def of_transformers(name, options):
    torch = pytest.importorskip("torch", reason="transformers' schedulers need torch (Python 3.11 here)")
    import transformers

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    scheduler = transformers.get_scheduler(name, optimizer, WARMUP, TOTAL, scheduler_specific_kwargs=options)
    values = []
    for _ in range(TOTAL + 1):
        values.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return values


@pytest.mark.every_jax
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"schedule": "linear"}, ("linear", {})),
        ({"schedule": "cosine"}, ("cosine", {})),
        ({"schedule": "cosine", "cycles": 2.5}, ("cosine", {"num_cycles": 2.5})),
        ({"schedule": "cosine", "cycles": 1.0}, ("cosine", {"num_cycles": 1})),
        ({"schedule": "cosine", "final_lr_fraction": 0.1}, ("cosine_with_min_lr", {"min_lr_rate": 0.1})),
        ({"schedule": "cosine", "min_lr": 1e-5}, ("cosine_with_min_lr", {"min_lr": 1e-5})),
        ({"schedule": "cosine_with_restarts"}, ("cosine_with_restarts", {})),
        ({"schedule": "cosine_with_restarts", "cycles": 3.0}, ("cosine_with_restarts", {"num_cycles": 3})),
        ({"schedule": "constant"}, ("constant_with_warmup", {})),
        ({"schedule": "inverse_sqrt"}, ("inverse_sqrt", {})),
        ({"schedule": "polynomial", "power": 2.0}, ("polynomial", {"power": 2.0, "lr_end": 0.0})),
        ({"schedule": "polynomial", "power": 0.5, "min_lr": 1e-5}, ("polynomial", {"power": 0.5, "lr_end": 1e-5})),
        (
            {"schedule": "wsd", "cooldown_steps": 20},
            ("warmup_stable_decay", {"num_decay_steps": 20, "decay_type": "linear"}),
        ),
        (  # transformers' warm-up starts from the final rate
            {"schedule": "wsd", "cooldown_steps": 20, "min_lr": PEAK / 8, "start_lr": PEAK / 8},
            ("warmup_stable_decay", {"num_decay_steps": 20, "decay_type": "linear", "min_lr_ratio": 1 / 8}),
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_equals_transformers(ours, theirs):
    np.testing.assert_allclose(rates(warmup_steps=WARMUP, **ours), of_transformers(*theirs), rtol=2e-5, atol=1e-10)


def test_wsd_is_flat_and_then_cools_down():
    values = rates(schedule="wsd", warmup_steps=WARMUP, cooldown_steps=20, final_lr_fraction=0.1)
    np.testing.assert_allclose(values[WARMUP:81], PEAK, rtol=1e-6)
    np.testing.assert_allclose(values[90], PEAK * 0.55, rtol=1e-5)
    np.testing.assert_allclose(values[100], PEAK * 0.1, rtol=1e-5)


def test_constant_cools_down_too():
    np.testing.assert_array_equal(
        rates(schedule="constant", cooldown_steps=20, min_lr=1e-5),
        rates(schedule="wsd", cooldown_steps=20, min_lr=1e-5),
    )


@pytest.mark.parametrize(
    ("options", "at_80"),
    [
        ({"schedule": "cosine"}, (1 + np.cos(np.pi * 70 / 90)) / 2),
        ({"schedule": "cosine", "cycles": 1.0}, (1 + np.cos(2 * np.pi * 70 / 90)) / 2),
        ({"schedule": "cosine_with_restarts", "cycles": 3.0}, (1 + np.cos(np.pi * 10 / 30)) / 2),
        ({"schedule": "polynomial", "power": 2.0}, (20 / 90) ** 2),
        ({"schedule": "linear"}, 20 / 90),
        ({"schedule": "inverse_sqrt"}, None),
    ],
    ids=lambda value: value["schedule"] if isinstance(value, dict) else "",
)
def test_a_cooldown_goes_straight_from_where_the_schedule_is_to_the_final_rate(options, at_80):
    options = {**options, "warmup_steps": WARMUP, "min_lr": 2e-5}
    values = rates(cooldown_steps=20, **options)
    np.testing.assert_allclose(values[:81], rates(**options)[:81], rtol=1e-6)
    start = PEAK * np.sqrt(10 / 80) if at_80 is None else 2e-5 + (PEAK - 2e-5) * at_80
    np.testing.assert_allclose(values[80:], np.interp(np.arange(80, 101), [80, 100], [start, 2e-5]), rtol=1e-5)


def test_constant_without_warmup_is_the_peak():
    np.testing.assert_allclose(rates(schedule="constant"), PEAK, rtol=1e-6)


def test_warmup_starts_from_start_lr():
    values = rates(start_lr=1e-4, warmup_steps=WARMUP)
    np.testing.assert_allclose(values[: WARMUP + 1], np.linspace(1e-4, PEAK, WARMUP + 1), rtol=1e-5)
    np.testing.assert_array_equal(values[WARMUP:], rates(warmup_steps=WARMUP)[WARMUP:])


def test_the_first_step_changes_nothing_as_in_transformers_and_the_option_to_set_says_so():
    assert rates(warmup_steps=WARMUP)[0] == 0.0
    assert "changes nothing" in OptimOptions.__dataclass_fields__["start_lr"].metadata["doc"]


def test_a_ratio_is_steps():
    np.testing.assert_array_equal(rates(warmup_ratio=0.1), rates(warmup_steps=10))


@pytest.mark.parametrize("schedule", ["linear", "cosine", "cosine_with_restarts", "polynomial"])
def test_decay_ratio_ends_the_decay_early_and_keeps_the_final_rate(schedule):
    options = {"schedule": schedule, "warmup_steps": WARMUP, "min_lr": 1e-5}
    values = rates(decay_ratio=0.6, **options)
    whole = learning_rate(OptimOptions(learning_rate=PEAK, **options), 60)
    np.testing.assert_allclose(values[:61], [float(whole(step)) for step in range(61)], rtol=1e-6)
    np.testing.assert_allclose(values[60:], 1e-5, rtol=1e-5)


@pytest.mark.parametrize("schedule", ["linear", "cosine", "cosine_with_restarts", "polynomial"])
def test_the_final_fraction_is_reached(schedule):
    np.testing.assert_allclose(rates(schedule=schedule, final_lr_fraction=0.2)[-1], PEAK * 0.2, rtol=1e-5)


@pytest.mark.parametrize("schedule", ["linear", "cosine", "polynomial", "inverse_sqrt"])
def test_min_lr_is_the_final_fraction_as_a_rate(schedule):
    options = {"schedule": schedule, "warmup_steps": WARMUP}
    np.testing.assert_allclose(rates(min_lr=PEAK * 0.4, **options), rates(final_lr_fraction=0.4, **options), rtol=1e-6)


@pytest.mark.parametrize("cycles", [6, 9, 45])
def test_every_restart_is_at_the_peak(cycles):
    values = rates(schedule="cosine_with_restarts", cycles=float(cycles), warmup_steps=WARMUP)
    np.testing.assert_allclose(values[WARMUP : -1 : 90 // cycles], PEAK, rtol=1e-6)


@pytest.mark.parametrize(
    ("options", "steps", "said"),
    [
        ({"warmup_steps": 3}, 4, None),
        ({"warmup_steps": 3}, 3, "all 3 steps are warm-up.*optim.learning_rate"),
        ({"warmup_ratio": 0.03}, 1, None),
        ({"warmup_steps": 1}, 1, "nothing is trained; set optim.warmup_steps=0"),
        ({"warmup_steps": 1, "start_lr": 1e-5}, 1, "all 1 steps are warm-up"),
        ({"schedule": "wsd", "warmup_steps": 3, "cooldown_steps": 3}, 6, None),
        ({"schedule": "wsd", "warmup_steps": 3, "cooldown_steps": 3}, 5, "optim.cooldown_steps are more than the 5"),
    ],
)
def test_a_run_too_short_for_its_schedule_is_warned_of(options, steps, said):
    note = check_length(OptimOptions(**options), steps)
    assert (note is None) if said is None else re.search(said, note)


def test_a_decay_that_is_over_before_warm_up_is_refused():
    with pytest.raises(UserError, match=r"optim\.decay_ratio=0\.5 of 8 steps.*after 4 steps"):
        check_length(OptimOptions(schedule="linear", warmup_steps=4, decay_ratio=0.5), 8)


def test_a_run_of_one_step_trains():
    assert float(learning_rate(OptimOptions(warmup_ratio=0.03), 1)(0)) == np.float32(OptimOptions().learning_rate)
