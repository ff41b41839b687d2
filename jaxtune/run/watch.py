"""Metrics, progress, profiler and stop requests of a running run, opened and closed together."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from typing import Any

import jax

from jaxtune.config import to_json
from jaxtune.config.schema import Config
from jaxtune.host.plugins import Callbacks
from jaxtune.host.run_folder import RunFolder
from jaxtune.monitor import throughput
from jaxtune.monitor.goodput import Goodput
from jaxtune.monitor.gpus import Gpus
from jaxtune.monitor.hang import exit_when_hung
from jaxtune.monitor.health import Health
from jaxtune.monitor.metrics import MetricsLog
from jaxtune.monitor.profiler import Profiler
from jaxtune.monitor.progress import Progress
from jaxtune.monitor.signals import StopRequest
from jaxtune.parallel import multihost


@dataclass(frozen=True)
class Watch:
    """The receiver of reports from the loop and its tasks."""

    metrics: MetricsLog
    progress: Progress
    profiler: Profiler
    goodput: Goodput
    health: Health
    stop: StopRequest
    plugins: Callbacks
    gpus: Gpus | None  # if log.gpu_every is set
    gpu_every: int
    work: throughput.Work
    epoch: Callable[[dict[str, Any]], float]

    def step(self, step: int, feed: dict[str, Any], values: Mapping[str, float], tokens: int, seconds: float) -> None:
        """Write and show a finished training step; feed: the position of the feed after it."""
        speed = tokens / seconds
        numbers = {**values, "epoch": self.epoch(feed), "tokens_per_second": speed, "step_seconds": seconds}
        mfu = throughput.mfu(self.work, speed, jax.devices()[0].device_kind, jax.sharding.get_mesh().size)
        if mfu is not None:
            numbers["mfu"] = mfu
        if self.gpus is not None and step % self.gpu_every == 0:
            numbers |= self.gpus.read()
        peak = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")  # a CPU has no statistics
        if peak is not None:
            numbers["peak_memory_bytes"] = peak
        self.metrics.write(step, numbers)
        self.progress.update(step, numbers)
        self.plugins("on_step", step, numbers)
        for line in self.health.notice(values):
            self.progress.message(f"step {step}: {line}")

    def evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """Write and show the metrics of an evaluation after a step."""
        self.plugins("on_evaluate", step, dict(values))
        self.scores(step, values)

    def scores(self, step: int, values: Mapping[str, float]) -> None:
        """Write and show metrics that are not of an evaluation of the objective."""
        self.metrics.write(step, values)
        self.progress.message("  ".join([f"step {step}", *(f"{name} {value:.4f}" for name, value in values.items())]))


@contextmanager
def watching(
    config: Config,
    folder: RunFolder,
    step: int,
    total_steps: int,
    epoch: Callable[[dict[str, Any]], float],
    work: throughput.Work,
    goodput: Goodput,
    plugins: Callbacks,
    step_text: Callable[[], str | None],
) -> Iterator[Watch]:
    """Open the watch of a run from `step` on. In this context stop requests are handled, and a hang ends the process.

    epoch: position of the feed -> passes over the data before it. step_text: returns the HLO text of the compiled step.
    """
    main = multihost.is_main()
    with ExitStack() as opened:
        sent = json.loads(to_json(config))
        metrics = MetricsLog(folder.path, config.log, config.train.run_name or "", sent, step, main)
        opened.enter_context(closing(metrics))
        profiler = opened.enter_context(closing(Profiler(folder.path, config.prof, main, step_text)))
        shown = Progress(total_steps, step, config.log.every, main, config.log.format)
        progress = opened.enter_context(closing(shown))
        opened.enter_context(exit_when_hung(goodput, config.train.hang_seconds, folder.stacks(jax.process_index())))
        gpus = Gpus() if config.log.gpu_every and main else None
        health, stop = Health(config.optim.name), opened.enter_context(StopRequest())
        yield Watch(
            metrics, progress, profiler, goodput, health, stop, plugins, gpus, config.log.gpu_every, work, epoch
        )
