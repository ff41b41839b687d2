"""The suite's piece `assumptions` turns measured times into rates, errors in percent, and a calibration."""

import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "benchmarks"))

from gpu import assumptions, predicted, workers  # noqa: E402

from jaxtune.plan.calibration import PLAUSIBLE  # noqa: E402
from jaxtune.plan.launches import Launch, LaunchedProgram  # noqa: E402
from jaxtune.plan.rates import KERNELS, SCENARIOS  # noqa: E402

BANDWIDTH, PEAK = 3352.32e9, 989.4e12  # of an H100
CENTRAL = SCENARIOS["central"]


def read(*launches: Launch, **executed: int) -> predicted.ReadProgram:
    return predicted.ReadProgram("h100", LaunchedProgram(list(launches)), {"graphs": 0, "outside": 0} | executed)


def product(m, n, k):
    moved = 2.0 * (m * k + n * k)
    return Launch("p", "product", "forward", 1, (("x", moved),), 2.0 * m * n, 2.0 * m * n * k, (m, n, k))


def fusion(moved, count=1):
    return Launch("f", "fusion", "forward", count, (("y", moved / 2),), moved / 2)


def test_the_fraction_of_the_table_from_milliseconds():
    flops = 2 * 4096**3
    value, _ = assumptions.solve("sustained", flops / 700e12, CENTRAL, read(product(4096, 4096, 4096)).seconds)
    assert value == pytest.approx(700 / 780, rel=1e-5)  # the sustained fraction that the table has for this product


def test_the_fraction_of_the_bandwidth_of_a_narrow_product():
    moved = 2 * (4096 * 4096 + 2 * 16 * 4096)
    value, _ = assumptions.solve("narrow", 20e-6, CENTRAL, read(product(4096, 16, 4096)).seconds)
    assert value == pytest.approx(moved / 18e-6 / BANDWIDTH, rel=1e-5)  # the model adds 2 us to such a product


def test_the_fraction_of_the_bandwidth_of_a_pass_without_its_launch():
    value, _ = assumptions.solve("bandwidth", 701.3e-6, CENTRAL, read(fusion(2e9)).seconds)
    assert value == pytest.approx(2e9 / 700e-6 / BANDWIDTH, rel=1e-5)


def test_the_fraction_of_the_peak_of_a_kernel():
    kernel = Launch("k", "flash_attention_forward", "forward", 1, (), 0.0, flops=2e11)
    value, _ = assumptions.solve("flash_attention_forward", 501.3e-6, CENTRAL, read(kernel).seconds)
    assert value == pytest.approx(2e11 / 500e-6 / PEAK, rel=1e-3)


@pytest.mark.parametrize(
    ("rate", "one", "seconds", "said"),
    [
        ("sustained", product(4096, 4096, 4096), 1e-5, "sustained from 0.3 to 1.25 predicts 587.3 to 141.0 us"),
        ("sustained", product(4096, 4096, 4096), 1.0, "and 1000000.0 us were measured"),
        ("sustained", fusion(1e6), 1.65e-6, "sustained from 0.3 to 1.25 predicts 1.7 to 1.7 us"),  # has no such rate
    ],
)
def test_no_plausible_value_is_none_with_the_reason(rate, one, seconds, said):
    value, why = assumptions.solve(rate, seconds, CENTRAL, read(one).seconds)
    assert value is None and said in why


def test_a_calibration_is_the_median_of_each_rate():
    rows = {
        "sustained/a": {"value": 0.9},
        "sustained/b": {"value": 0.7},
        "sustained/c": {"value": 0.8},
        "narrow/a": {"value": 0.5},
        "narrow/b": {"error": "wrong"},
        "fp8/a": {"refused": "an A100"},
        "step/0.6B": {"microseconds": 1.0},
    }
    assert assumptions.calibration(rows) == {"sustained": 0.8, "narrow": 0.5}


def test_prediction_beside_measurement():
    seconds = 2 * 4096**3 / 700e12
    row = predicted.compare_prediction(read(product(4096, 4096, 4096)), seconds, {"sustained": 700 / 780})
    assert row["predicted_microseconds"] == pytest.approx(2 * 4096**3 / (0.92 * 780e12) * 1e6)
    assert row["error_percent"] == pytest.approx(100 * (700 / (0.92 * 780) - 1))  # -2.5: the prediction is too fast
    fast, slow = row["range_microseconds"]
    assert fast < row["predicted_microseconds"] < slow
    assert row["calibrated_error_percent"] == pytest.approx(0)
    assert not any(key.startswith("calibrated") for key in predicted.compare_prediction(read(fusion(1e6)), 1.0))


@pytest.fixture
def measure_in(monkeypatch):
    """Return `measure` with fixed programs, and with these times in microseconds in the order it measures them."""

    def measure(contender, times, smoke=False):
        programs = {
            "launch": read(fusion(8192, 256), graphs=1),
            "bandwidth": read(fusion(2e9)),
            "l2": read(
                Launch("a", "fusion", "forward", 1, (("x", 16e6),), 16e6),
                Launch("b", "fusion", "forward", 1, (("a", 16e6),), 16e6),
            ),
        }
        order = iter([*assumptions.BEFORE.get(contender, ()), contender])
        times_by_name = dict(zip([*assumptions.BEFORE.get(contender, ()), contender], times))
        made = assumptions.MeasuredProgram(lambda x: x, (np.ones(4, np.float32),))
        patched = {rate: (lambda case, smoke: made, ("one",)) for rate in assumptions.PROGRAMS}
        monkeypatch.setattr(assumptions, "PROGRAMS", patched)
        monkeypatch.setattr(assumptions, "compile_and_read", lambda *_, **__: (lambda *x: x, programs[next(order)]))
        monkeypatch.setattr(
            assumptions, "seconds_per_call", lambda calls, *_: {name: 1e-6 * times_by_name[name] for name in calls}
        )
        return assumptions.measure(contender, "one", smoke)

    return measure


def test_a_rate_is_found_after_those_that_it_is_seen_beside(measure_in):
    tiny = 8192 / (0.85 * BANDWIDTH) * 1e6
    launch = 256 * (tiny + 3.0) + 2.5  # launches of 3 us
    cold = 2e9 / (0.9 * BANDWIDTH) * 1e6 + 3.0
    mega = 1e6 * 16e6 / (0.9 * BANDWIDTH)  # us
    hot = 2 * mega + (mega / 2 + mega) + 2 * 3.0  # what the first launch wrote is read twice as fast
    row = measure_in("l2", [launch, cold, hot])
    assert row["value"] == pytest.approx(2.0, rel=1e-4) and row["assumed"] == 1.5
    assert row["launches"] == {"fusion": 2} and "error" not in row


def test_an_implausible_time_is_an_error_and_no_value(measure_in):
    row = measure_in("bandwidth", [1.0])
    assert row["error"].startswith("wrong: bandwidth from 0.4 to 1 predicts") and "value" not in row
    launch = 256 * 4.0
    row = measure_in("l2", [launch, 1.0, 1.0])  # the bandwidth has an error, so l2 has no value
    assert "bandwidth" in row["error"] and "value" not in row


def test_in_a_smoke_run_nothing_is_an_error(measure_in):
    row = measure_in("bandwidth", [1.0], smoke=True)
    assert "implausible" in row and not set(workers.REASONS) & set(row)


def test_a_gpu_that_the_model_does_not_know_is_refused(monkeypatch):
    monkeypatch.setattr(assumptions, "known_gpu", lambda: None)
    assert assumptions.measure("sustained", "4096x4096x4096", False)["refused"].startswith("the time model has no")


def test_every_rate_but_those_of_other_kernels_has_a_program_and_those_before_it_too():
    assert set(assumptions.PROGRAMS) <= set(PLAUSIBLE) <= set(assumptions.PROGRAMS) | set(KERNELS)
    jobs = [job.contender for job in assumptions.piece(smoke=False).jobs]
    assert all(set(before) <= set(jobs) for before in assumptions.BEFORE.values())
    assert all(job == "zero-init" for job in jobs[jobs.index("step") + 1 :])  # all rates come before the step


def test_the_step_is_given_the_rates_that_were_found(monkeypatch):
    passed = []

    def measure_step(config, shape, steps, measured):
        passed.append(measured)
        return {"seconds": 2.0}

    monkeypatch.setattr(assumptions.train_step, "measure_step", measure_step)
    row = assumptions.measure("step", "0.6B", False, {"sustained/one": {"value": 0.8}})
    assert passed == [{"sustained": 0.8}] == [row["calibrated_with"]] and row["microseconds"] == 2e6


@pytest.mark.parametrize(("differs", "said"), [(None, None), (1, "between two runs"), (2, assumptions.ZERO_INIT)])
def test_one_bit_that_differs_is_an_error(monkeypatch, differs, said):
    """`differs` is the index of the run that differs: with zeros, the same again, without zeros."""
    assert assumptions._differing([np.zeros(3), np.ones(2)], [np.zeros(3), np.nextafter(np.ones(2), 2)]) == 1
    assert assumptions._differing([np.zeros(3)], [-np.zeros(3)]) == 1  # equal, but with other bits
    calls = iter(range(100))

    class Compiled:
        def __call__(self, state, *_):
            run = next(calls) // assumptions.STEPS
            return state, {"loss": np.float32(1.0 + (run == differs) * 1e-6)}

        def as_text(self):
            return ""

    monkeypatch.setattr(assumptions, "compile_and_read", lambda *_, **__: (Compiled(), None))
    row = assumptions.measure("zero-init", "small", True)
    assert (said in row["error"] and "same_bits" not in row) if said else row["same_bits"] == "yes"
