"""The loop: its position, as checkpoints hold it, and what it leaves behind."""

import gc
import itertools
import json
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtune.config.schema import Config
from jaxtune.monitor.signals import Asked
from jaxtune.run.best import Standing
from jaxtune.run.loop import Moment, Position, each, train
from jaxtune.run.plugins import Callbacks


def test_a_position_is_what_it_was_saved_as():
    position = Position(
        step=7, feed={"row": 2**53 + 1}, tokens=2**40, bad_steps=1, put_off=("eval",), standing=Standing(4, 0.5, 1)
    )
    saved = json.loads(json.dumps({"data": "key"} | position.to_json()))
    assert Position.from_json(saved) == position


def test_checkpoints_from_before_feeds_are_understood():
    saved = {"step": 4, "row": 8, "tokens": 427, "bad_steps": 0, "evaluation_due": True}
    assert Position.from_json(saved) == Position(4, {"row": 8}, 427, 0, ("eval",))


def test_steps_leave_the_garbage_collector_nothing(one_device):
    """Neither objects nor arrays: the collector of Python has as little to do after many steps as after a few."""
    step = jax.jit(lambda state, *_: (state + 1, {"loss": state, "grad_norm": state, "tokens": state}))

    def left_by(steps: int) -> tuple[int, int]:
        ignore = lambda *_: None  # noqa: E731
        watch: Any = SimpleNamespace(
            goodput=SimpleNamespace(measure=lambda _: nullcontext()),
            profiler=SimpleNamespace(before_step=ignore, after_step=ignore),
            stop=SimpleNamespace(agree=lambda end: Asked.NOTHING),
            plugins=Callbacks(),
            epoch=lambda feed: 0.0,
            step=ignore,
        )
        batches: Any = itertools.repeat(({}, {}))
        gc.collect()
        gc.disable()
        try:
            train(Config(), step, jnp.float32(0), {}, batches, Position(), np.ones(steps), [], watch)
            return len(jax.live_arrays()), gc.collect()
        finally:
            gc.enable()

    left_by(5)
    few, many = left_by(5), left_by(105)
    assert many == few


def test_what_is_due_by_steps_and_by_passes_over_the_data():
    # 10 rows an epoch, 4 a step
    at = [Moment(step, step * 0.4, (step - 1) * 0.4) for step in range(1, 11)]
    due = lambda **options: [moment.step for moment in at if each(**options)(moment)]  # noqa: E731
    assert due() == []
    assert due(steps=4) == [4, 8]
    assert due(epochs=1.0) == [3, 5, 8, 10]
    assert due(epochs=0.5) == [2, 3, 4, 5, 7, 8, 9, 10]
    assert due(steps=3, epochs=2.0) == [3, 5, 6, 9, 10]
