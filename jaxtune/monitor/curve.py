"""The loss curve of a run as a picture."""

import math
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxtune.monitor import metrics

_INK, _TRAIN, _EVAL, _RATE = "#333333", "#2a6fbb", "#d1495b", "#b0b0b0"


def draw(metrics_file: pathlib.Path, picture: pathlib.Path, title: str) -> None:
    """Write a PNG of training loss (each step, and smoothed), evaluation loss and learning rate over the steps.

    Non-finite values are left out, and a run without rows gives empty axes. Raises UserError for a damaged
    metrics.jsonl.
    """
    from matplotlib.figure import Figure  # takes a second to import, which no start of a run should wait for

    rows = metrics.read(metrics_file)
    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    rate_axes = axes.twinx()
    axes.set_zorder(1)  # the losses in front of the learning rate
    axes.patch.set_visible(False)

    steps, losses = _series(rows, "loss")
    axes.plot(steps, losses, color=_TRAIN, alpha=0.25, linewidth=0.8)
    axes.plot(steps, smooth(losses), color=_TRAIN, linewidth=1.8, label="training loss")
    steps, losses = _series(rows, "eval_loss")
    if losses.size:
        axes.plot(steps, losses, color=_EVAL, marker="o", markersize=4, linewidth=1.2, label="evaluation loss")
        axes.annotate(
            f"{losses[-1]:.3f}", (steps[-1], losses[-1]), (0, 7), textcoords="offset points", ha="right", color=_EVAL
        )
    rate_axes.plot(*_series(rows, "learning_rate"), color=_RATE, linewidth=1, linestyle=":", label="learning rate")

    axes.set_title(title, loc="left", color=_INK)
    axes.set_xlabel("step", color=_INK)
    axes.set_ylabel("loss (nats per token)", color=_INK)
    rate_axes.set_ylabel("learning rate", color=_RATE)
    rate_axes.tick_params(colors=_RATE, labelsize=7)
    rate_axes.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    rate_axes.yaxis.get_offset_text().set(color=_RATE, fontsize=7)
    rate_axes.set_ylim(bottom=0)
    for each in (axes, rate_axes):
        each.spines[:].set_visible(False)
    axes.spines["bottom"].set(visible=True, color=_INK)
    axes.grid(axis="y", color="#eeeeee")
    lines = [*axes.get_lines()[1:], *rate_axes.get_lines()]
    axes.legend(handles=lines, frameon=False, labelcolor=_INK, loc="upper right")
    figure.savefig(picture)


def smooth(values: np.ndarray) -> np.ndarray:
    """Centred moving average over about a thirtieth of the values, weighted towards the middle; shorter at the ends."""
    if not values.size:
        return values
    weights = np.hanning(2 * (values.size // 60) + 3)[1:-1]  # without the zeros at its ends
    weighted = np.convolve(values, weights)
    total = np.convolve(np.ones_like(values), weights)
    return (weighted / total)[weights.size // 2 :][: values.size]


def _series(rows: Sequence[dict[str, Any]], name: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and finite values of a metric."""
    points = [(row["step"], row[name]) for row in rows if not isinstance(row.get(name, ""), str)]
    points = [(step, value) for step, value in points if math.isfinite(value)]
    steps, values = np.array(points, dtype=float).reshape(-1, 2).T  # without points: (0, 2)
    return steps, values
