"""The loop around the step: batches in, metrics out, tasks between steps, and the reasons to stop."""

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jaxtyping import Float32

from jaxtune.config.schema import Config
from jaxtune.errors import UserError
from jaxtune.models.decoder import Parameters
from jaxtune.run.state import State
from jaxtune.run.watch import Watch


@dataclass
class Position:
    """Where a run is: Python integers, which do not wrap."""

    step: int = 0
    feed: dict[str, Any] = dataclasses.field(default_factory=dict)  # where its data is; JSON, {} at the beginning
    tokens: int = 0  # seen so far, without padding
    bad_steps: int = 0  # non-finite, in a row
    put_off: tuple[str, ...] = ()  # tasks to run before the next step: those that a request to stop came before

    def to_json(self) -> dict[str, Any]:
        """As saved in a checkpoint."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> "Position":
        """From what a checkpoint holds, which is more than this."""
        numbers = {name: saved[name] for name in ("step", "tokens", "bad_steps")}
        feed = saved["feed"] if "feed" in saved else {"row": saved["row"]}  # as checkpoints say it before `feed`
        # Checkpoints before `put_off` knew evaluation alone.
        put_off = saved.get("put_off", ("eval",) if saved.get("evaluation_due") else ())
        return cls(**numbers, feed=feed, put_off=tuple(put_off))


@dataclass(frozen=True)
class Task:
    """What is done between steps.

    name: what its time is counted as. due: whether it is after a step, counted from 1. run: with the state and position
    after that step. at_stop: whether it runs when the run is asked to stop, due or not; others are put off then, to the
    start of the resumed run, because whoever asks to stop will not wait.
    """

    name: str
    due: Callable[[int], bool]
    run: Callable[[State, Position], None]
    at_stop: bool = False


def each(steps: int, total_steps: int) -> Callable[[int], bool]:
    """Due every so many steps, 0 for none of them, and after the last."""
    return lambda step: step == total_steps or (steps > 0 and step % steps == 0)


def train(
    config: Config,
    train_step: Callable[[State, Parameters, Any, np.float32], tuple[State, dict[str, Any]]],
    state: State,
    frozen: Parameters,
    batches: Iterator[tuple[dict[str, Any], Any]],
    position: Position,
    rates: Float32[np.ndarray, " steps"],
    tasks: Sequence[Task],
    watch: Watch,
) -> State:
    """Steps from `position`, which is updated, to the last, or until asked to stop; returns the last state.

    `batches`: (position of the feed after it, what `train_step` takes), again and again. `rates`: the learning rate of
    every step of the run, from its first.
    Metrics of a step are read after the next one has been dispatched, so that the device never waits for the host;
    before a task they are up to date. Raises UserError after train.max_bad_steps non-finite steps in a row.
    """
    pending: tuple[Position, Any] | None = None
    last, total_steps = 0.0, len(rates)

    def report() -> None:
        nonlocal pending, last
        if pending is not None:
            (at, results), pending = pending, None
            values = {name: value.item() for name, value in jax.device_get(results).items()}
            values["learning_rate"] = float(rates[at.step - 1])
            now = time.perf_counter()
            seconds, last = now - last, now
            _report(watch, position, at, values, seconds, config.train.max_bad_steps)

    def run(names: Sequence[str]) -> None:
        for task in tasks:
            if task.name in names:
                with watch.goodput.measure(task.name):
                    task.run(state, position)

    run(position.put_off)
    last = time.perf_counter()
    while position.step < total_steps:
        with watch.goodput.measure("data wait"):
            after, batch = next(batches)
        with watch.goodput.measure("step"):
            watch.profiler.before_step()
            state, results = train_step(state, frozen, batch, rates[position.step])
            watch.profiler.after_step(results)
            report()
            stopping = watch.stop.agree()
        position.step, position.feed = position.step + 1, after
        pending = dataclasses.replace(position), results

        asked = stopping and position.step < total_steps
        due = [task for task in tasks if task.due(position.step) or (stopping and task.at_stop)]
        position.put_off = tuple(task.name for task in due if asked and not task.at_stop)
        if due:
            with watch.goodput.measure("step"):
                report()
            run([task.name for task in due if task.name not in position.put_off])
            last = time.perf_counter()
        if stopping:
            break
    return state


def _report(
    watch: Watch, position: Position, at: Position, values: dict[str, float], seconds: float, max_bad_steps: int
) -> None:
    """Count and show the step that ended `at`. Raises UserError where too many were not finite."""
    tokens = int(values.pop("tokens"))
    position.tokens += tokens
    finite = math.isfinite(values["loss"]) and math.isfinite(values["grad_norm"])
    if not finite and math.isfinite(values["loss"]) and (scale := values.get("loss_scale", 1.0)) > 1.0:
        watch.progress.message(f"step {at.step} skipped: gradients overflowed float16; loss scale now {scale / 2:g}")
        finite = True  # with a smaller scale the next one may be
    position.bad_steps = 0 if finite else position.bad_steps + 1
    counts = {"tokens": position.tokens, "bad_steps": position.bad_steps}
    watch.step(at.step, at.feed, values | counts, tokens, seconds)
    if position.bad_steps >= max_bad_steps:
        place = ", ".join(f"{name} {value}" for name, value in at.feed.items())
        suspicion = "No step was finite: the weights may hold NaN. " if at.step == position.bad_steps else ""
        raise UserError(
            f"{position.bad_steps} steps in a row were not finite (train.max_bad_steps), the last step {at.step}, "
            f"which ended at {place}. They changed no parameter. {suspicion}Lower "
            "optim.learning_rate, or try precision.recipe='fp32'"
        )
