"""Profiles of a few steps with jax.profiler, for TensorBoard, XProf or Perfetto; their breakdown; a memory profile."""

import logging
import pathlib
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax

from jaxtune.config.schema import ProfOptions
from jaxtune.monitor import step_time

log = logging.getLogger("jaxtune")
_trace_requested = threading.Event()  # a trace was requested by SIGUSR1


@contextmanager
def trace_on_signal() -> Iterator[None]:
    """In this context SIGUSR1 requests a trace of the next steps instead of ending the process; main thread only."""
    if threading.current_thread() is not threading.main_thread():  # Python handles signals only there
        yield
        return
    _trace_requested.clear()
    before = signal.signal(signal.SIGUSR1, lambda *_: _trace_requested.set())
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL if before is None else before)


def trace_folder(folder: pathlib.Path, prof: ProfOptions) -> pathlib.Path:
    """The folder of the traces of a run's main process."""
    return folder / "profile" if prof.dir is None else pathlib.Path(prof.dir).expanduser() / folder.name


class Profiler:
    """Traces steps `prof.start_step` .. `prof.start_step + prof.steps - 1` into `<folder>/profile`, or prof.dir.

    Steps are counted from the start of this process, so that a resumed run can be traced too and compilation is left
    out. The main process writes a trace of its own devices; with prof.every_process every process does. A process that
    gets SIGUSR1 (kill -USR1 PID) traces the next steps, whatever the options are. Processes other than the first use a
    subfolder with their number, because the name of a trace has only host and second. The breakdown of the step's time
    is logged and written next to the trace (`step_time`). step_text: returns the text of the compiled step; called when
    a trace has ended.
    """

    def __init__(
        self, folder: pathlib.Path, prof: ProfOptions, is_main: bool, step_text: Callable[[], str | None]
    ) -> None:
        self._folder, self._step_text = trace_folder(folder, prof), step_text
        if not is_main:
            self._folder /= f"process-{jax.process_index()}"
        self._steps, self._memory = prof.steps, prof.memory
        self._first = prof.start_step if prof.enabled and (is_main or prof.every_process) else None
        self._last = 0
        self._count = 0
        self._tracing = False

    def before_step(self) -> None:
        """Start a trace if one is due; call right before a step is dispatched."""
        self._count += 1
        if not self._tracing and (_trace_requested.is_set() or self._count == self._first):
            _trace_requested.clear()
            self._last = self._count + self._steps - 1
            jax.profiler.start_trace(self._folder)
            self._tracing = True

    def after_step(self, results: Any) -> None:
        """End a trace that is complete, after waiting for `results`; call right after a step is dispatched."""
        if self._tracing and self._count == self._last:
            jax.block_until_ready(results)
            self.close()

    def close(self) -> None:
        """End a trace that is running, also if the run ends before the last step to trace."""
        if not self._tracing:
            return
        jax.profiler.stop_trace()
        self._tracing = False
        if self._memory:
            jax.profiler.save_device_memory_profile(str(self._folder / f"memory-{self._count}.prof"))
        steps = self._count - self._last + self._steps  # fewer if the run ended first
        log.info("profile of %d steps: %s", steps, self._folder)
        file = self._folder / step_time.NAME
        file.unlink(missing_ok=True)  # left by an earlier trace
        try:
            breakdown = step_time.read_step_time(self._folder, self._step_text() or "", steps)
        except Exception as error:  # a run must not end because XLA has changed names in its traces
            log.warning("no breakdown of the step time: this profile cannot be read: %r", error)
            return
        breakdown.write(file)
        log.info("%s", breakdown.text())
