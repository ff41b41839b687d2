"""The progress of a run: a bar on a terminal or in a notebook, or plain lines if stdout is a file or a pipe."""

import datetime
import html
import importlib
import logging
import math
import statistics
import time
from collections import deque
from collections.abc import Mapping

import rich.console
import rich.progress
import rich.text

from jaxtune.errors import format_bytes

# Progress lines are printed without the log; this logger writes them to the log file (`host.process.log_to_file`).
FILE = logging.getLogger("jaxtune-progress")
MEAN_STEPS = 20  # the mean loss is over this many steps


class Progress:
    """Shows step, loss, its mean over the last steps, learning rate, gradient norm, epoch, tokens/s and the time left;
    reward, accuracy, margin, MFU and the device's peak memory if they are known.

    `start` steps of `total` are already done. On a terminal this is a bar; otherwise a line every `every` steps and for
    the last step. A step whose loss is not finite always gets its own line. Only the main process shows anything.
    A notebook has one line below the cell, updated in place. With the format "lines" or "key_value" there are lines
    everywhere. `FILE` gets lines and messages too.
    """

    def __init__(self, total: int, start: int, every: int, is_main: bool = True, format: str = "auto") -> None:
        self._total, self._every, self._format = total, every, format
        self._is_main = is_main
        self._first: tuple[int, float] | None = None  # the first step and its end: it may include loading
        self._losses: deque[float] = deque(maxlen=MEAN_STEPS)
        self._console = rich.console.Console(highlight=False, emoji=False, soft_wrap=True)
        self._bar = self._cell = None
        if self._console.is_jupyter:
            # rich's own bar would need ipywidgets, and rich converts every line to HTML.
            self._console = rich.console.Console(force_jupyter=False, highlight=False, emoji=False, soft_wrap=True)
            self._cell = _Cell(total, start) if is_main and format == "auto" else None
        elif is_main and self._console.is_terminal and format == "auto":
            numbers = rich.progress.TextColumn("{task.completed}/{task.total}  {task.fields[numbers]}")
            # A narrow terminal has no room for a bar next to the numbers.
            bar = [rich.progress.BarColumn(bar_width=20)] if self._console.width >= 120 else []
            self._bar = rich.progress.Progress(*bar, numbers, console=self._console)
            self._task = self._bar.add_task("", total=total, completed=start, numbers="first step")
            self._bar.start()

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show a finished step; metrics: its row in metrics.jsonl, in which any metric may be missing."""
        if not self._is_main:
            return
        left = self._seconds_left(step)
        numbers = rich.text.Text("" if left is None else f"{datetime.timedelta(seconds=round(left))} left  ")
        finite = math.isfinite(metrics.get("loss", 0.0))
        if "loss" in metrics and finite:
            self._losses.append(metrics["loss"])
        mean = {"mean_loss": statistics.fmean(self._losses)} if len(self._losses) > 1 else {}
        numbers += _numbers({**metrics, **mean})
        if self._bar is not None:
            self._bar.update(self._task, completed=step, numbers=numbers.markup)
        if self._cell is not None:
            self._cell.update(step, numbers.plain)
        if finite and not (self._every and (step % self._every == 0 or step == self._total)):
            return
        if self._format == "key_value":
            line = rich.text.Text(" ".join(f"{key}={value}" for key, value in {"step": step, **metrics}.items()))
        else:
            line = rich.text.Text(f"step {step}/{self._total}  ") + numbers
        if not finite or (self._bar is None and self._cell is None):
            self._console.print(line)
        FILE.info("%s", line.plain)

    def message(self, text: str) -> None:
        """Print a line; above the bar if there is one."""
        if self._is_main:
            self._console.print(text, markup=False)
            FILE.info("%s", text)

    def close(self) -> None:
        """Leave the bar as it is and give the terminal back."""
        if self._bar is not None:
            self._bar.stop()

    def _seconds_left(self, step: int) -> float | None:
        now = time.monotonic()
        if self._first is None:
            self._first = (step, now)
            return None
        first, since = self._first
        return (now - since) / (step - first) * (self._total - step) if step > first else None


class _Cell:
    """A line in a notebook below the running cell, updated in place."""

    def __init__(self, total: int, start: int) -> None:
        self._total, self._shown = total, time.monotonic()
        display = importlib.import_module("IPython.display").display  # installed, because this is its kernel
        self._handle = display(self._text(start, "first step"), raw=True, display_id=True)

    def update(self, step: int, numbers: str) -> None:
        """Show a step; at most ten a second, because a notebook cannot keep up with more, and always the last one."""
        if step == self._total or time.monotonic() - self._shown >= 0.1:
            self._shown = time.monotonic()
            self._handle.update(self._text(step, numbers), raw=True)

    def _text(self, step: int, numbers: str) -> dict[str, str]:
        line = f"{step}/{self._total}  {numbers}"
        bar = f'<progress value="{step}" max="{self._total}"></progress>'
        return {"text/plain": line, "text/html": f"{bar} <code>{html.escape(line)}</code>"}


def _numbers(metrics: Mapping[str, float]) -> rich.text.Text:
    """The metrics that are present, in a fixed order; non-finite values in red."""
    formats = (
        ("loss", "loss", lambda value: f"{value:.4f}"),
        ("mean_loss", "mean", lambda value: f"{value:.3f}"),
        ("reward", "reward", lambda value: f"{value:.3f}"),
        ("accuracy", "accuracy", lambda value: f"{value:.0%}"),
        ("rewards/accuracies", "accuracy", lambda value: f"{value:.0%}"),  # preference losses
        ("rewards/margins", "margin", lambda value: f"{value:.3f}"),
        ("learning_rate", "lr", lambda value: f"{value:.1e}"),
        ("grad_norm", "grad norm", lambda value: f"{value:.3f}"),
        ("epoch", "epoch", lambda value: f"{value:.2f}"),
        ("tokens_per_second", "tokens/s", lambda value: f"{value:,.0f}"),
        ("mfu", "MFU", lambda value: f"{value:.0%}"),
        ("peak_memory_bytes", "peak", lambda value: format_bytes(value, 1)),
    )
    parts = []
    for key, label, show in formats:
        if (value := metrics.get(key)) is None:
            continue
        part = rich.text.Text(f"{label} ")
        if math.isfinite(value):
            part.append(show(value))
        else:
            part.append("NaN" if math.isnan(value) else f"{value}", style="bold red")
        parts.append(part)
    return rich.text.Text("  ").join(parts)
