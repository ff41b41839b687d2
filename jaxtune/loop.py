"""The loop around the step: batches in, metrics out, checkpoints, evaluations, and the reasons to stop."""

import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax

from jaxtune.config.schema import Config
from jaxtune.errors import UserError
from jaxtune.models.decoder import Parameters
from jaxtune.monitor.goodput import Goodput
from jaxtune.monitor.metrics import MetricsLog
from jaxtune.monitor.profiler import Profiler
from jaxtune.monitor.progress import Progress
from jaxtune.monitor.signals import StopRequest
from jaxtune.step import Batch, State


@dataclass
class Position:
    """Where a run is: Python integers, which do not wrap."""

    step: int = 0
    row: int = 0  # the next global row
    tokens: int = 0  # seen so far, without padding
    bad_steps: int = 0  # non-finite, in a row
    evaluation_due: bool = False  # a request to stop came before the evaluation of this step

    def to_json(self) -> dict[str, int]:
        """As saved in a checkpoint."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> "Position":
        """From what a checkpoint holds, which is more."""
        return cls(**{field.name: saved[field.name] for field in dataclasses.fields(cls)})


@dataclass(frozen=True)
class Hooks:
    """What the loop calls: each is given, none is looked up."""

    train_step: Callable[[State, Parameters, Batch], tuple[State, dict[str, jax.Array]]]
    evaluate: Callable[[State], dict[str, float]] | None
    save: Callable[[State, Position], None]
    utilization: Callable[[float], float | None]  # tokens per second -> MFU


@dataclass(frozen=True)
class Watch:
    """What observes the loop, and what may stop it."""

    metrics: MetricsLog
    progress: Progress
    profiler: Profiler
    goodput: Goodput
    stop: StopRequest


def train(
    config: Config,
    state: State,
    frozen: Parameters,
    batches: Iterator[tuple[int, Batch]],
    position: Position,
    total_steps: int,
    hooks: Hooks,
    watch: Watch,
) -> State:
    """Steps from `position`, which is updated, to `total_steps`, or until asked to stop; returns the last state.

    Metrics of a step are read after the next one has been dispatched, so that the device never waits for the host;
    before an evaluation or a checkpoint they are up to date. Raises UserError after train.max_bad_steps non-finite
    steps in a row.
    """
    goodput, profiler = watch.goodput, watch.profiler
    pending: tuple[Position, Any] | None = None
    last = time.perf_counter()

    def report() -> None:
        nonlocal pending, last
        if pending is None:
            return
        (at, results), pending = pending, None
        values = {name: value.item() for name, value in jax.device_get(results).items()}
        now = time.perf_counter()
        seconds, last = now - last, now
        tokens = values.pop("tokens")
        position.tokens += tokens
        finite = math.isfinite(values["loss"]) and math.isfinite(values["grad_norm"])
        if not finite and math.isfinite(values["loss"]) and (scale := values.get("loss_scale", 1.0)) > 1.0:
            watch.progress.message(
                f"step {at.step} skipped: gradients overflowed float16; loss scale now {scale / 2:g}"
            )
            finite = True  # a smaller scale may do
        position.bad_steps = 0 if finite else position.bad_steps + 1
        row = {
            **values,
            "tokens": position.tokens,
            "tokens_per_second": tokens / seconds,
            "step_seconds": seconds,
            "bad_steps": position.bad_steps,
        }
        if (mfu := hooks.utilization(tokens / seconds)) is not None:
            row["mfu"] = mfu
        watch.metrics.write(at.step, row)
        watch.progress.update(at.step, row)
        if position.bad_steps >= config.train.max_bad_steps:
            suspicion = "No step was finite: the weights may hold NaN. " if at.step == position.bad_steps else ""
            raise UserError(
                f"{position.bad_steps} steps in a row were not finite (train.max_bad_steps), the last step {at.step}, "
                f"which ended at row {at.row}. They changed no parameter. {suspicion}Lower "
                "optim.learning_rate, or try precision.recipe='fp32'"
            )

    def evaluate() -> None:
        assert hooks.evaluate is not None
        with goodput.measure("eval"):
            values = hooks.evaluate(state)
        watch.metrics.write(position.step, values)
        numbers = (f"{name} {value:.4f}" for name, value in values.items())
        watch.progress.message("  ".join([f"step {position.step}", *numbers]))

    if position.evaluation_due:
        evaluate()
    while position.step < total_steps:
        with goodput.measure("data wait"):
            next_row, batch = next(batches)
        with goodput.measure("step"):
            profiler.before_step()
            state, results = hooks.train_step(state, frozen, batch)
            profiler.after_step(results)
            report()
        position.step, position.row = position.step + 1, next_row
        pending = dataclasses.replace(position), results

        stopping = watch.stop.agree()
        done = position.step == total_steps
        save = stopping or done or (config.ckpt.save_steps and position.step % config.ckpt.save_steps == 0)
        due = hooks.evaluate is not None and (
            done or (config.eval.steps > 0 and position.step % config.eval.steps == 0)
        )
        # Whoever asks to stop will not wait for an evaluation: the resumed run makes up for it.
        position.evaluation_due = due and stopping and not done
        if save or due:
            with goodput.measure("step"):
                report()
        if due and not position.evaluation_due:
            evaluate()
        if save:
            with goodput.measure("save"):
                hooks.save(state, position)
        if save or due:
            last = time.perf_counter()
        if stopping:
            break
    return state
