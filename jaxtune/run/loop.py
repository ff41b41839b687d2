"""The training loop: runs steps on batches, reports metrics, runs tasks between steps, and stops."""

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
from jaxtune.errors import UserError, format_count
from jaxtune.models.decoder import Parameters
from jaxtune.monitor.signals import StopReason
from jaxtune.run.best import BestTracker
from jaxtune.run.watch import Watch
from jaxtune.training.state import State


@dataclass
class Position:
    """The progress of a run, in Python integers, which do not overflow.

    Attributes:
        step: Number of finished steps.
        feed: Position in the data, as JSON; {} at the beginning.
        tokens: Number of tokens trained on so far, without padding.
        bad_steps: Number of non-finite steps in a row.
        put_off: Tasks to run before the next step, because a request to stop came before they could run.
        standing: The best evaluation so far.
        ended: Why the run finished before its last step; "" if it did not.
        plugins: State of each plugin, as JSON.
        spikes: Number of spikes in a row.
        high_losses: Number of steps in a row with a loss above guard.max_loss.
    """

    step: int = 0
    feed: dict[str, Any] = dataclasses.field(default_factory=dict)
    tokens: int = 0
    bad_steps: int = 0
    put_off: tuple[str, ...] = ()
    standing: BestTracker = BestTracker()
    ended: str = ""
    plugins: dict[str, Any] = dataclasses.field(default_factory=dict)
    spikes: int = 0
    high_losses: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return the position as it is saved in a checkpoint."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> "Position":
        """Read the position from a checkpoint's JSON, which has further entries."""
        numbers = {name: saved[name] for name in ("step", "tokens", "bad_steps")}
        feed = saved["feed"] if "feed" in saved else {"row": saved["row"]}  # older checkpoints have only a row
        # Checkpoints from before `put_off` could only put off an evaluation.
        put_off = saved.get("put_off", ("eval",) if saved.get("evaluation_due") else ())
        standing, plugins = BestTracker(**saved.get("standing", {})), saved.get("plugins", {})
        numbers |= {name: saved.get(name, 0) for name in ("spikes", "high_losses")}
        return cls(**numbers, feed=feed, put_off=tuple(put_off), standing=standing, plugins=plugins)  # JSON has lists


class StepInfo(NamedTuple):
    """A moment between two steps.

    Attributes:
        step: Number of finished steps.
        epochs: Passes over the data so far.
        epochs_before: Passes over the data one step earlier.
    """

    step: int
    epochs: float
    epochs_before: float


@dataclass(frozen=True)
class Task:
    """A task that runs between steps.

    Attributes:
        name: Name under which its time is counted.
        due: Whether the task is due at a moment.
        run: Runs the task with the state and position at that moment.
        at_end: Whether the task also runs after the last step, which early stopping may bring forward.
        at_stop: Whether the task runs if the run is requested to stop, due or not. Other tasks are then put off to the
            start of the resumed run, because whoever stops a run will not wait for them.
    """

    name: str
    due: Callable[[StepInfo], bool]
    run: Callable[[State, Position], None]
    at_end: bool = True
    at_stop: bool = False


def every(steps: int = 0, epochs: float | None = None) -> Callable[[StepInfo], bool]:
    """Make a `due` function, true every `steps` steps (0: never) and every `epochs` epochs (None: never)."""

    def due(at: StepInfo) -> bool:
        # A multiple of `epochs` was passed in this step.
        epoch_due = epochs is not None and math.floor(at.epochs / epochs) > math.floor(at.epochs_before / epochs)
        return epoch_due or (steps > 0 and at.step % steps == 0)

    return due


# (state, frozen, batch, learning rate) -> (state, metrics).
TrainStep = Callable[[State, Parameters, Any, np.float32], tuple[State, dict[str, Any]]]


def train(
    config: Config,
    train_step: TrainStep,
    state: State,
    frozen: Parameters,
    batches: Iterator[tuple[dict[str, Any], Any]],
    position: Position,
    rates: Float32[np.ndarray, " steps"],
    tasks: Sequence[Task],
    watch: Watch,
    roll_back: Callable[[State], State] | None = None,
) -> State:
    """Train from `position`, which is updated, to the last step, an early end or a request to stop.

    Metrics of a step are read after the next step is dispatched, so that the device never waits for the host. They are
    up to date before a task and at the end. Tasks run in their order; a task may end the run, and the tasks after it
    see that.

    Args:
        config: The run's config.
        train_step: (state, frozen, batch, learning rate) -> (state, metrics).
        state: The state to start from.
        frozen: The frozen parameters.
        batches: Pairs of the feed's position after a batch, and the batch.
        position: The run's progress.
        rates: The learning rate of every step of the run, from the first one.
        tasks: Tasks to run between steps.
        watch: Progress, metrics, profiler, plugins and requests to stop.
        roll_back: Returns the state to continue with after a step turned out to be a spike (`training.guard`).

    Returns:
        The last state.

    Raises:
        UserError: train.max_bad_steps steps in a row changed nothing.
    """
    reporter, total_steps = _Reporter(config, position, rates, watch, roll_back), len(rates)
    measure = watch.goodput.measure
    with contextlib.closing(reporter.arrivals):
        for task in tasks:
            if task.name in position.put_off:
                state = reporter.run(task, state)
        while position.step < total_steps and not position.ended:
            try:
                with measure("data wait"):
                    after, batch = next(batches)
                with measure("step"):
                    watch.profiler.before_step()
                    state, results = train_step(state, frozen, batch, rates[position.step])
            except UserError:  # from the data or a reward; report the step before, which has finished
                reporter.report(state)
                raise
            with measure("step"):
                reporter.arrivals.watch(results)
                watch.profiler.after_step(results)
                state = reporter.report(state)
                request = watch.stop.agree(bool(watch.plugins.ending))  # a collective: every process, in every step
            moment = StepInfo(position.step + 1, watch.epoch(after), watch.epoch(position.feed))
            position.step, position.feed, position.put_off = moment.step, after, ()
            # A copy, because `position` has advanced by the time the results are reported.
            reporter.pending = dataclasses.replace(position), results
            if roll_back is not None:  # before the next step, which must not start from the weights of a spike
                with measure("step"):
                    state = reporter.report(state)
            if request is StopReason.END:
                position.ended = watch.plugins.ending or "a plugin of another process requested it"
            stopping = request is StopReason.STOP
            for task in tasks:
                ending = position.step == total_steps or bool(position.ended)
                if not (task.due(moment) or (task.at_end and ending) or (task.at_stop and stopping)):
                    continue
                if stopping and not ending and not task.at_stop:
                    position.put_off += (task.name,)
                else:
                    state = reporter.run(task, state)
            if stopping:
                break
        with measure("step"):
            return reporter.report(state)


class _Arrivals:
    """Records the time at which each step's results arrive.

    A thread waits for them, because the main thread may be in the next dispatch. On a CPU a dispatch may last as long
    as a step.
    """

    def __init__(self) -> None:
        self._results: SimpleQueue[Any] = SimpleQueue()
        self._times: SimpleQueue[float] = SimpleQueue()
        # A daemon, because results never arrive if another process has failed, and this process must still end.
        threading.Thread(target=self._watch, name="results of steps", daemon=True).start()

    def watch(self, results: Any) -> None:
        """Wait in the thread for these results; call this right after a step is dispatched."""
        self._results.put(results)

    def next(self) -> float:
        """Wait for the next step's results and return their arrival time, by `time.perf_counter`."""
        return self._times.get()

    def close(self) -> None:
        """End the thread."""
        self._results.put(None)

    def _watch(self) -> None:
        while (results := self._results.get()) is not None:
            with contextlib.suppress(RuntimeError):  # the reader of the results gets the same error
                jax.block_until_ready(results)
            # Do not keep the arrays alive while this thread waits for the next step.
            del results
            self._times.put(time.perf_counter())


@dataclass
class _Reporter:
    """Reports a step after the next one is dispatched; the fields without a comment are arguments of `train`."""

    config: Config
    position: Position
    rates: Float32[np.ndarray, " steps"]
    watch: Watch
    roll_back: Callable[[State], State] | None
    pending: tuple[Position, Any] | None = None  # the position after a step, and its results, to be reported
    last: float = dataclasses.field(default_factory=time.perf_counter)  # when results arrived, or a task was done
    arrivals: _Arrivals = dataclasses.field(default_factory=_Arrivals)

    def report(self, state: State) -> State:
        """Report the pending step, if there is one, once its results are there; return the state to continue with."""
        if self.pending is None:
            return state
        (at, results), self.pending = self.pending, None
        metrics = jax.device_get(results)  # waits until the step has ended
        absent = metrics.pop("absent", {})
        values = {name: value.item() for name, value in metrics.items() if not absent.get(name)}
        # Step n was taken with rates[n - 1], times the factor of the guard.
        values["learning_rate"] = float(self.rates[at.step - 1]) * values.pop("rate_factor", 1.0)
        now = self.arrivals.next()
        seconds, self.last = now - self.last, now
        _report(self.watch, self.position, at, values, seconds, self.config)
        if self.roll_back is not None and values.get("spike"):
            state = self.roll_back(state)
            self.last = time.perf_counter()
        return state

    def run(self, task: Task, state: State) -> State:
        """Report the pending step and run a task; return the state to continue with."""
        with self.watch.goodput.measure("step"):
            state = self.report(state)
        with self.watch.goodput.measure(task.name):
            task.run(state, self.position)
        self.last = time.perf_counter()
        return state


def _report(
    watch: Watch, position: Position, at: Position, values: dict[str, float], seconds: float, config: Config
) -> None:
    """Count and show the step that ended `at`; end the run if too many steps in a row had a loss above guard.max_loss.

    Raises UserError if too many steps in a row changed nothing.
    """
    max_bad_steps, guard = config.train.max_bad_steps, config.guard
    tokens = int(values.pop("tokens"))
    position.tokens += tokens
    finite = math.isfinite(values["loss"]) and math.isfinite(values["grad_norm"])
    if not finite and math.isfinite(values["loss"]) and (scale := values.get("loss_scale", 1.0)) > 1.0:
        watch.progress.message(f"step {at.step} skipped: gradients overflowed float16; loss scale now {scale / 2:g}")
        finite = True  # not a bad step, because the next one may be finite with the smaller scale
    position.bad_steps = 0 if finite else position.bad_steps + 1
    position.spikes = position.spikes + 1 if values.get("spike") else 0
    if position.spikes:
        measured = f"loss {values['loss']:.4g}, gradient norm {values['grad_norm']:.4g}"
        watch.progress.message(f"step {at.step} was a spike and changed nothing: {measured}")
    high = guard.max_loss is not None and values["loss"] > guard.max_loss
    position.high_losses = position.high_losses + 1 if high else 0
    if position.high_losses >= guard.max_loss_steps:
        steps = format_count(position.high_losses, "step")
        position.ended = f"the loss of {steps} in a row was above guard.max_loss = {guard.max_loss:g}"
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
            f"at {place}. They changed no parameter. If the loss is always so noisy, raise guard.deviations and "
            "guard.norm_factor; else inspect the data there, or lower optim.learning_rate"
        )
