"""A trace of a few steps with jax.profiler, for TensorBoard, XProf or Perfetto; what it says; the memory after them."""

import logging
import pathlib
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax

from jaxtune.config.schema import Prof
from jaxtune.monitor import step_time

log = logging.getLogger("jaxtune")
_asked = threading.Event()  # for a trace, by SIGUSR1


@contextmanager
def asked_by_signal() -> Iterator[None]:
    """SIGUSR1, which would end the process, asks for a trace of the next steps meanwhile; in the main thread alone."""
    if threading.current_thread() is not threading.main_thread():  # where alone Python answers signals
        yield
        return
    _asked.clear()
    before = signal.signal(signal.SIGUSR1, lambda *_: _asked.set())
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL if before is None else before)


def trace_folder(folder: pathlib.Path, prof: Prof) -> pathlib.Path:
    """Where the main process of a run writes its traces."""
    return folder / "profile" if prof.dir is None else pathlib.Path(prof.dir).expanduser() / folder.name


class Profiler:
    """Traces steps `prof.start_step` .. `prof.start_step + prof.steps - 1` into `<folder>/profile`, or prof.dir.

    Steps are counted from the start of this process, so that a resumed run can be traced too and compilation is left
    out. The main process writes a trace, of its own devices; with prof.every_process every one does. A process that
    gets SIGUSR1 (kill -USR1 PID) traces the next steps, whatever the options say. Processes but the first have a folder
    of their number in it, as a trace is named by its host and second alone. Where the time of a step went is logged and
    written beside the trace (`step_time`); `step_text`: that of the compiled step, read when a trace has ended.
    """

    def __init__(self, folder: pathlib.Path, prof: Prof, is_main: bool, step_text: Callable[[], str | None]) -> None:
        self._folder, self._step_text = trace_folder(folder, prof), step_text
        if not is_main:
            self._folder /= f"process-{jax.process_index()}"
        self._steps, self._memory = prof.steps, prof.memory
        self._first = prof.start_step if prof.enabled and (is_main or prof.every_process) else None
        self._last = 0
        self._count = 0
        self._tracing = False

    def before_step(self) -> None:
        """Call right before a step is dispatched."""
        self._count += 1
        if not self._tracing and (_asked.is_set() or self._count == self._first):
            _asked.clear()
            self._last = self._count + self._steps - 1
            jax.profiler.start_trace(self._folder)
            self._tracing = True

    def after_step(self, results: Any) -> None:
        """Call right after a step is dispatched; after the last traced step, waits for its `results`."""
        if self._tracing and self._count == self._last:
            jax.block_until_ready(results)
            self.close()

    def close(self) -> None:
        """End a trace that is still running, as when the run ended before its last traced step."""
        if not self._tracing:
            return
        jax.profiler.stop_trace()
        self._tracing = False
        if self._memory:
            jax.profiler.save_device_memory_profile(str(self._folder / f"memory-{self._count}.prof"))
        steps = self._count - self._last + self._steps
        log.info("profile of %d steps: %s", steps, self._folder)
        file = self._folder / step_time.NAME
        file.unlink(missing_ok=True)  # of an earlier trace
        try:
            found = step_time.read_step_time(self._folder, self._step_text() or "", steps)
        except Exception as error:  # a run does not end because XLA has come to name things otherwise
            log.warning("where the time of a step goes cannot be read from this profile: %r", error)
            return
        found.write(file)
        log.info("%s", found.text())
