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
from jaxtune.run.loop import Position, train


def test_a_position_is_what_it_was_saved_as():
    position = Position(step=7, feed={"row": 2**53 + 1}, tokens=2**40, bad_steps=1, put_off=("eval",))
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
            stop=SimpleNamespace(agree=lambda: False),
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
