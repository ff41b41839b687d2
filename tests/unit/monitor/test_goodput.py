"""How a run's wall time is spent."""

import collections

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxtune.monitor.goodput import Goodput


@given(
    st.lists(st.tuples(st.sampled_from(["compile", "step", "save"]), st.integers(1, 9), st.integers(0, 9)), max_size=9)
)
def test_goodput_parts_sum_to_the_wall_time(spans):
    now = 0
    goodput = Goodput(clock=lambda: now)
    for outer, before, inside in spans:
        with goodput.measure(outer):
            now += before
            with goodput.measure("data wait"):
                now += inside
            now += before
        now += 1
    seconds = collections.defaultdict(float, goodput.seconds())  # parts that took no time may be missing
    assert sum(seconds.values()) == now
    assert seconds["data wait"] == sum(inside for _, _, inside in spans)
    assert seconds["save"] == sum(2 * before for outer, before, _ in spans if outer == "save")
    assert seconds["other"] == len(spans)


def test_goodput_report_is_one_line_with_the_largest_first():
    ticks = iter([0.0, 1.0, 8.0, 8.0, 8.04, 10.04, 10.04])
    goodput = Goodput(clock=lambda: next(ticks))
    with goodput.measure("step"):
        pass
    with goodput.measure("teacher"):  # a part that would be shown as 0.0 s is left out
        pass
    assert goodput.report() == "wall time 10.0 s: step 7.0 s (70%), other 3.0 s (30%)"


def test_goodput_survives_an_error_inside():
    now = 0
    goodput = Goodput(clock=lambda: now)
    with pytest.raises(ValueError), goodput.measure("step"):
        now += 2
        raise ValueError
    now += 3
    assert goodput.seconds() | {"step": 2, "other": 3} == goodput.seconds()
