"""The loop around the step: batches in, metrics out, tasks between steps, and the reasons to stop."""

import contextlib
import dataclasses
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float32

from jaxtune.config.schema import Config
from jaxtune.errors import UserError
from jaxtune.models.decoder import Parameters
from jaxtune.monitor.signals import Asked
from jaxtune.run.best import Standing
from jaxtune.run.watch import Watch
from jaxtune.training.state import State


@dataclass
class Position:
    """Where a run is: Python integers, which do not wrap."""

    step: int = 0
    feed: dict[str, Any] = dataclasses.field(default_factory=dict)  # where its data is; JSON, {} at the beginning
    tokens: int = 0  # seen so far, without padding
    bad_steps: int = 0  # non-finite, in a row
    put_off: tuple[str, ...] = ()  # tasks to run before the next step: those that a request to stop came before
    standing: Standing = Standing()  # of the evaluations so far
    ended: str = ""  # why the run is finished before its last step, if it is
    plugins: dict[str, Any] = dataclasses.field(default_factory=dict)  # what each keeps; JSON
    spikes: int = 0  # in a row

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
        standing, plugins = Standing(**saved.get("standing", {})), saved.get("plugins", {})
        numbers["spikes"] = saved.get("spikes", 0)
        return cls(**numbers, feed=feed, put_off=tuple(put_off), standing=standing, plugins=plugins)


class Moment(NamedTuple):
    """Between two steps: how many steps there were, and how many passes over the data, also a step earlier."""

    step: int
    epochs: float
    epochs_before: float


@dataclass(frozen=True)
class Task:
    """What is done between steps.

    name: what its time is counted as. due: whether it is at a moment. run: with the state and position then. at_end:
    whether it runs after the last step, which may come before it is expected. at_stop: whether it runs when the run is
    asked to stop, due or not; others are put off then, to the start of the resumed run, because whoever asks to stop
    will not wait.
    """

    name: str
    due: Callable[[Moment], bool]
    run: Callable[[State, Position], None]
    at_end: bool = True
    at_stop: bool = False


def each(steps: int = 0, epochs: float | None = None) -> Callable[[Moment], bool]:
    """Due every so many steps, 0 for none, and every so many passes over the data, None for none."""

    def due(at: Moment) -> bool:
        passed = epochs is not None and math.floor(at.epochs / epochs) > math.floor(at.epochs_before / epochs)
        return passed or (steps > 0 and at.step % steps == 0)

    return due


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
    roll_back: Callable[[State], State] | None = None,
) -> State:
    """Steps from `position`, which is updated, to the last, until it has ended, or until asked to stop.

    Returns the last state.

    `batches`: (position of the feed after it, what `train_step` takes), again and again. `rates`: the learning rate of
    every step of the run, from its first.
    Metrics of a step are read after the next one has been dispatched, so that the device never waits for the host;
    before a task, and at the end, they are up to date. Tasks run in their order, and one may end the run before those
    after it.
    `roll_back`: the state to go on with once a step is known to have been a spike (`training.guard`).
    Raises UserError after train.max_bad_steps steps in a row that changed nothing.
    """
    pending: tuple[Position, Any] | None = None
    last, total_steps = 0.0, len(rates)

    def report() -> None:
        nonlocal pending, last, state
        if pending is not None:
            (at, results), pending = pending, None
            found = jax.device_get(results)
            absent = found.pop("absent", {})
            values = {name: value.item() for name, value in found.items() if not absent.get(name)}
            values["learning_rate"] = float(rates[at.step - 1]) * values.pop("rate_factor", 1.0)
            now = arrivals.next()
            seconds, last = now - last, now
            _report(watch, position, at, values, seconds, config.train.max_bad_steps)
            if roll_back is not None and values.get("spike"):
                state = roll_back(state)
                last = time.perf_counter()

    def run(task: Task) -> None:
        with watch.goodput.measure("step"):
            report()
        with watch.goodput.measure(task.name):
            task.run(state, position)

    for task in tasks:
        if task.name in position.put_off:
            run(task)
    last = time.perf_counter()
    with contextlib.closing(_Arrivals()) as arrivals:
        while position.step < total_steps and not position.ended:
            try:
                with watch.goodput.measure("data wait"):
                    after, batch = next(batches)
                with watch.goodput.measure("step"):
                    watch.profiler.before_step()
                    state, results = train_step(state, frozen, batch, rates[position.step])
            except UserError:  # of the data, or of a reward; the step before it is finished
                report()
                raise
            with watch.goodput.measure("step"):
                arrivals.watch(results)
                watch.profiler.after_step(results)
                report()
                asked_for = watch.stop.agree(bool(watch.plugins.ending))
            moment = Moment(position.step + 1, watch.epoch(after), watch.epoch(position.feed))
            position.step, position.feed, position.put_off = moment.step, after, ()
            pending = dataclasses.replace(position), results
            if roll_back is not None:  # before another step is taken from weights that may go back
                with watch.goodput.measure("step"):
                    report()
            if asked_for is Asked.END:
                position.ended = watch.plugins.ending or "a plugin of another process asked for it"
            stopping = asked_for is Asked.STOP
            for task in tasks:
                ending = position.step == total_steps or position.ended
                if not (task.due(moment) or (task.at_end and ending) or (task.at_stop and stopping)):
                    continue
                if stopping and not ending and not task.at_stop:
                    position.put_off += (task.name,)
                else:
                    run(task)
                    last = time.perf_counter()
            if stopping:
                break
        with watch.goodput.measure("step"):
            report()
    return state


class _Arrivals:
    """When the results of each step are there: seen by a thread, as the main one may be in the next dispatch then.

    A dispatch may last as long as a step, as on a CPU.
    """

    def __init__(self) -> None:
        self._results: SimpleQueue[Any] = SimpleQueue()
        self._times: SimpleQueue[float] = SimpleQueue()
        # A daemon: where another process has failed, results never come, and this process must still end.
        threading.Thread(target=self._watch, name="results of steps", daemon=True).start()

    def watch(self, results: Any) -> None:
        """Call right after a step is dispatched."""
        self._results.put(results)

    def next(self) -> float:
        """The time of the next step's results, by `time.perf_counter`; waits for them."""
        return self._times.get()

    def close(self) -> None:
        """End the thread."""
        self._results.put(None)

    def _watch(self) -> None:
        while (results := self._results.get()) is not None:
            with contextlib.suppress(RuntimeError):  # which whoever reads the results gets too
                jax.block_until_ready(results)
            del results
            self._times.put(time.perf_counter())


def _report(
    watch: Watch, position: Position, at: Position, values: dict[str, float], seconds: float, max_bad_steps: int
) -> None:
    """Count and show the step that ended `at`. Raises UserError where too many changed nothing."""
    tokens = int(values.pop("tokens"))
    position.tokens += tokens
    finite = math.isfinite(values["loss"]) and math.isfinite(values["grad_norm"])
    if not finite and math.isfinite(values["loss"]) and (scale := values.get("loss_scale", 1.0)) > 1.0:
        watch.progress.message(f"step {at.step} skipped: gradients overflowed float16; loss scale now {scale / 2:g}")
        finite = True  # with a smaller scale the next one may be
    position.bad_steps = 0 if finite else position.bad_steps + 1
    position.spikes = position.spikes + 1 if values.get("spike") else 0
    if position.spikes:
        found = f"loss {values['loss']:.4g}, gradient norm {values['grad_norm']:.4g}"
        watch.progress.message(f"step {at.step} is a spike, and changed nothing: {found}")
    counts = {"tokens": position.tokens, "bad_steps": position.bad_steps}
    watch.step(at.step, at.feed, values | counts, tokens, seconds)
    place = ", ".join(f"{name} {value}" for name, value in at.feed.items())
    if position.bad_steps >= max_bad_steps:
        suspicion = "No step was finite: the weights may hold NaN. " if at.step == position.bad_steps else ""
        raise UserError(
            f"{position.bad_steps} steps in a row were not finite (train.max_bad_steps), the last step {at.step}, "
            f"which ended at {place}. They changed no parameter. {suspicion}Lower "
            "optim.learning_rate, or try precision.recipe='fp32'"
        )
    if position.spikes >= max_bad_steps:
        raise UserError(
            f"{position.spikes} steps in a row were spikes (train.max_bad_steps), the last step {at.step}, which ended "
            f"at {place}. They changed no parameter. If this is how the loss is, raise guard.deviations and "
            "guard.norm_factor; else look at the data there, or lower optim.learning_rate"
        )
