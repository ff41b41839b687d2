"""Series of metrics.jsonl, one per metric: their positions on the x axes, summaries, and thinning for charts."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Row = Mapping[str, Any]
AXES = ("step", "tokens", "hours")
"""The x axes of charts: step, tokens trained on until then, hours spent in steps until then."""


@dataclass(frozen=True)
class Series:
    """One metric.

    Attributes:
        at: positions of the values on each axis that the run has.
        values: in the order of the file.
    """

    at: dict[str, np.ndarray]
    values: np.ndarray

    def take(self, chosen: np.ndarray) -> "Series":
        """The points with these indices."""
        return Series({axis: places[chosen] for axis, places in self.at.items()}, self.values[chosen])


def series(rows: Sequence[Row]) -> dict[str, Series]:
    """The series of every numeric metric, by name, in order of first appearance."""
    places = _places(rows)
    columns: dict[str, tuple[list[int], list[float]]] = {}
    for index, row in enumerate(rows):
        for name, value in row.items():
            if name != "step" and not isinstance(value, str):
                indices, values = columns.setdefault(name, ([], []))
                indices.append(index)
                values.append(float(value))
    return {
        name: Series({axis: place[indices] for axis, place in places.items()}, np.array(values))
        for name, (indices, values) in columns.items()
    }


def _places(rows: Sequence[Row]) -> dict[str, np.ndarray]:
    """The position of every row on each axis. An evaluation has the position of the step before it."""
    places = {"step": np.array([row["step"] for row in rows], dtype=float)}
    if any("tokens" in row for row in rows):
        # The row of an evaluation has no tokens, and gets the last count.
        places["tokens"] = np.maximum.accumulate(np.array([row.get("tokens", 0) for row in rows], dtype=float))
    if any("step_seconds" in row for row in rows):
        places["hours"] = np.cumsum([row.get("step_seconds", 0.0) for row in rows]) / 3600  # an evaluation takes 0
    return places


def summary(metric: Series) -> dict[str, Any]:
    """The number of values and of non-finite ones; the last, lowest and highest value with their steps."""
    steps, values = metric.at["step"], metric.values
    finite = np.flatnonzero(np.isfinite(values))
    extremes = {}
    if finite.size:
        low, high = finite[np.argmin(values[finite])], finite[np.argmax(values[finite])]
        extremes = {
            "lowest": [float(values[low]), int(steps[low])],
            "highest": [float(values[high]), int(steps[high])],
        }
    return {
        "count": int(values.size),
        "not_finite": int(values.size - finite.size),
        "last": [float(values[-1]), int(steps[-1])],
        **extremes,
    }


def thin(metric: Series, most: int) -> tuple[Series, Series]:
    """Thin a series to about `most` points. Returns (points to draw, points to smooth); short series stay as they are.

    Points to draw are the lowest, the highest and the first non-finite point of each interval, so no spike is lost.
    Points to smooth are the interval's means: the extremes would not represent the values between them.
    """
    count = metric.values.size
    if count <= most:
        return metric, metric
    edges = np.linspace(0, count, math.ceil(most / 2) + 1).astype(int)  # two points are drawn of an interval
    drawn, places, means = {0, count - 1}, [], []
    for first, end in itertools.pairwise(edges):
        finite = np.isfinite(metric.values[first:end])
        inside, outside = first + np.flatnonzero(finite), first + np.flatnonzero(~finite)
        drawn.update(outside[:1].tolist())
        if inside.size:
            values = metric.values[inside]
            drawn.update((int(inside[np.argmin(values)]), int(inside[np.argmax(values)])))
            places.append({axis: place[inside].mean() for axis, place in metric.at.items()})
            means.append(values.mean())
    at = {axis: np.array([place[axis] for place in places]) for axis in metric.at}
    return metric.take(np.array(sorted(drawn))), Series(at, np.array(means))
