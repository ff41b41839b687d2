"""A trace of a few steps with jax.profiler, for TensorBoard, XProf or Perfetto."""

import pathlib
from typing import Any

import jax

from jaxtune.config.schema import Prof


class Profiler:
    """Traces steps `prof.start_step` .. `prof.start_step + prof.steps - 1` into `<folder>/profile`.

    Steps are counted from the start of this process, so that a resumed run can be traced too and compilation is left
    out. Only the main process writes a trace, of its own devices.
    """

    def __init__(self, folder: pathlib.Path, prof: Prof, is_main: bool) -> None:
        self._folder = folder / "profile"
        self._enabled = prof.enabled and is_main
        self._first, self._last = prof.start_step, prof.start_step + prof.steps - 1
        self._count = 0
        self._tracing = False

    def before_step(self) -> None:
        """Call right before a step is dispatched."""
        self._count += 1
        if self._enabled and self._count == self._first:
            jax.profiler.start_trace(self._folder)
            self._tracing = True

    def after_step(self, results: Any) -> None:
        """Call right after a step is dispatched; after the last traced step, waits for its `results`."""
        if self._tracing and self._count == self._last:
            jax.block_until_ready(results)
            self.close()

    def close(self) -> None:
        """End a trace that is still running, as when the run ended before its last traced step."""
        if self._tracing:
            jax.profiler.stop_trace()
            self._tracing = False
