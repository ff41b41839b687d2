"""The loop: its position, which checkpoints hold, and its results."""

import gc
import itertools
import json
import math
import time
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtune.config.schema import Config, GuardOptions, TrainOptions
from jaxtune.errors import UserError
from jaxtune.host.plugins import Callbacks
from jaxtune.monitor.signals import StopReason
from jaxtune.run.best import BestTracker
from jaxtune.run.loop import Position, StepInfo, Task, every, train


def test_a_position_is_what_it_was_saved_as():
    position = Position(
        step=7, feed={"row": 2**53 + 1}, tokens=2**40, bad_steps=1, put_off=("eval",), standing=BestTracker(4, 0.5, 1)
    )
    saved = json.loads(json.dumps({"data": "key"} | position.to_json()))
    assert Position.from_json(saved) == position


def test_checkpoints_from_before_feeds_are_understood():
    saved = {"step": 4, "row": 8, "tokens": 427, "bad_steps": 0, "evaluation_due": True}
    assert Position.from_json(saved) == Position(4, {"row": 8}, 427, 0, ("eval",))


def run(
    step,
    steps: int,
    tasks=(),
    rows: list | None = None,
    position: Position | None = None,
    batches: Any = None,
    guard: GuardOptions = GuardOptions(),
    **train_options,
) -> Any:
    """Run the loop around `step`; `rows` gets each report: (step, values, seconds)."""
    ignore = lambda *_: None  # noqa: E731
    report = ignore if rows is None else lambda step, _, values, tokens, seconds: rows.append((step, values, seconds))
    watch: Any = SimpleNamespace(
        goodput=SimpleNamespace(measure=lambda _: nullcontext()),
        profiler=SimpleNamespace(before_step=ignore, after_step=ignore),
        progress=SimpleNamespace(message=ignore),
        stop=SimpleNamespace(agree=lambda end: StopReason.NOTHING),
        plugins=Callbacks(),
        epoch=lambda feed: 0.0,
        step=report,
    )
    batches = batches or itertools.repeat(({}, {}))
    config = Config(train=TrainOptions(**train_options), guard=guard)
    return train(config, step, jnp.float32(0), {}, batches, position or Position(), np.ones(steps), tasks, watch)


@pytest.mark.parametrize(
    ("losses", "ended_at"),
    # The loss of a step is known when the next one runs.
    [([1, 9, 9, 1, 9, 9, 9, 1, 1, 1], 8), ([1, 9, 9, 1, 9, 9, 1, 9, 9, 1], None), ([5] * 10, None)],
)
def test_a_loss_that_stays_above_the_limit_ends_the_run(one_device, losses, ended_at):
    position, values = Position(), iter(losses)
    run(lambda state, *_: (state, results(next(values))), 10, (), [], position, guard=GuardOptions(max_loss=5.0))
    assert position.step == (ended_at or 10)
    assert position.ended == ("the loss of 3 steps in a row was above guard.max_loss = 5" if ended_at else "")
    assert Position.from_json(json.loads(json.dumps(position.to_json()))).high_losses == position.high_losses


def results(loss: float = 1.0, **more: Any) -> dict[str, Any]:
    return {name: jnp.asarray(value) for name, value in {"loss": loss, "grad_norm": loss, "tokens": 4}.items()} | more


@pytest.mark.parametrize("steps", [1, 3])
def test_every_step_is_reported_and_checked_the_last_one_too(one_device, steps):
    """Also if neither an evaluation nor a checkpoint follows."""
    rows, position = [], Position()
    losses = iter([1.0] * (steps - 1) + [math.nan])
    run(lambda state, *_: (state, results(next(losses))), steps, (), rows, position)
    assert [row[0] for row in rows] == list(range(1, steps + 1)) and math.isnan(rows[-1][1]["loss"])
    assert position.bad_steps == 1 and position.tokens == 4 * steps
    with pytest.raises(UserError, match="1 steps in a row were not finite"):
        run(lambda state, *_: (state, results(math.nan)), 1, max_bad_steps=1)


@pytest.mark.parametrize("wrong", ["data", "reward"])
def test_a_step_is_reported_where_the_next_one_fails_for_what_the_user_gave(one_device, wrong):
    """The feed reaches a sample that cannot be used, or a reward function fails."""

    def fail(*_: Any) -> Any:
        raise UserError("bad row")

    def batches() -> Iterator[Any]:
        yield from [({}, {})] * 2
        yield fail() if wrong == "data" else ({}, {})

    rows, steps = [], iter([lambda state: (state, results())] * 2 + [fail])
    with pytest.raises(UserError, match="bad row"):
        run(lambda state, *_: next(steps)(state), 5, (), rows, batches=batches())
    assert [row[0] for row in rows] == [1, 2]


def test_the_seconds_of_a_step_are_between_results(one_device):
    """Also if a dispatch takes as long as its step, and for the steps before and after a task."""

    def step(state: Any, *_: Any) -> tuple[Any, dict[str, Any]]:
        time.sleep(0.2)
        return state, results()

    rows: list[Any] = []
    save = Task("save", every(3), lambda state, at: time.sleep(0.5), at_end=False)
    began = time.perf_counter()
    run(step, 6, [save], rows)
    seconds = [row[2] for row in rows]
    assert min(seconds) > 0.1, seconds
    assert sum(seconds) < time.perf_counter() - began - 0.9, "tasks do not count"


def test_a_metric_of_a_kind_that_a_step_lacks_is_not_reported(one_device):
    kinds = {"rewards/chosen": jnp.float32(0.5), "rewards/rejected": jnp.float32(0.0)}
    absent = {"rewards/chosen": jnp.bool(False), "rewards/rejected": jnp.bool(True)}
    rows: list[Any] = []
    run(lambda state, *_: (state, results(**kinds, absent=absent)), 1, (), rows)
    assert rows[0][1]["rewards/chosen"] == 0.5
    assert "rewards/rejected" not in rows[0][1] and "absent" not in rows[0][1]


def test_steps_leave_the_garbage_collector_nothing(one_device):
    """Neither objects nor arrays: after many steps Python's collector finds as little as after a few."""
    step = jax.jit(lambda state, *_: (state + 1, {"loss": state, "grad_norm": state, "tokens": state}))

    assert not gc.isenabled()

    def left_by(steps: int) -> tuple[int, int]:
        gc.collect()
        run(step, steps)  # the collector is off (tests/conftest.py)
        return len(jax.live_arrays()), gc.collect()

    left_by(5)
    few, many = left_by(5), left_by(105)
    assert many == few


def test_what_is_due_by_steps_and_by_passes_over_the_data():
    # 10 rows an epoch, 4 a step
    at = [StepInfo(step, step * 0.4, (step - 1) * 0.4) for step in range(1, 11)]
    due = lambda **options: [moment.step for moment in at if every(**options)(moment)]  # noqa: E731
    assert due() == []
    assert due(steps=4) == [4, 8]
    assert due(epochs=1.0) == [3, 5, 8, 10]
    assert due(epochs=0.5) == [2, 3, 4, 5, 7, 8, 9, 10]
    assert due(steps=3, epochs=2.0) == [3, 5, 6, 9, 10]
