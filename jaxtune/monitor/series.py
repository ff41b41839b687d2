"""What metrics.jsonl holds, one series a metric: where values stand, what they come to, and fewer points to draw."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Row = Mapping[str, Any]
AXES = ("step", "tokens", "hours")
"""What a value can be drawn over: its step, the tokens trained on until then, the hours spent in steps until then."""


@dataclass(frozen=True)
class Series:
    """A metric's values in the order of the file, and for each axis that the run has, where they stand on it."""

    at: dict[str, np.ndarray]
    values: np.ndarray

    def take(self, chosen: np.ndarray) -> "Series":
        """The points with these indices."""
        return Series({axis: places[chosen] for axis, places in self.at.items()}, self.values[chosen])


def series(rows: Sequence[Row]) -> dict[str, Series]:
    """Every metric that is a number, by name, in the order in which they first appear."""
    places = _places(rows)
    found: dict[str, tuple[list[int], list[float]]] = {}
    for index, row in enumerate(rows):
        for name, value in row.items():
            if name != "step" and not isinstance(value, str):
                indices, values = found.setdefault(name, ([], []))
                indices.append(index)
                values.append(float(value))
    return {
        name: Series({axis: place[indices] for axis, place in places.items()}, np.array(values))
        for name, (indices, values) in found.items()
    }


def _places(rows: Sequence[Row]) -> dict[str, np.ndarray]:
    """For each axis where every row stands. An evaluation's row stands where the step before it ended."""
    places = {"step": np.array([row["step"] for row in rows], dtype=float)}
    if any("tokens" in row for row in rows):
        places["tokens"] = np.maximum.accumulate(np.array([row.get("tokens", 0) for row in rows], dtype=float))
    if any("step_seconds" in row for row in rows):
        places["hours"] = np.cumsum([row.get("step_seconds", 0.0) for row in rows]) / 3600
    return places


def summary(metric: Series) -> dict[str, Any]:
    """Of all values the number, the last, the lowest and the highest with their steps, and how many are not finite."""
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


def thinned(metric: Series, most: int) -> tuple[Series, Series]:
    """The points to draw, about `most` of them, and those to smooth; all points, twice, if there are no more.

    Of each stretch of points, its lowest, its highest and its first that is not finite are drawn, so that no spike is
    lost; smoothed is its mean, as those two are not what is between them.
    """
    count = metric.values.size
    if count <= most:
        return metric, metric
    edges = np.linspace(0, count, math.ceil(most / 2) + 1).astype(int)
    kept, places, means = {0, count - 1}, [], []
    for first, end in itertools.pairwise(edges):
        finite = np.isfinite(metric.values[first:end])
        inside, outside = first + np.flatnonzero(finite), first + np.flatnonzero(~finite)
        kept.update(outside[:1].tolist())
        if inside.size:
            values = metric.values[inside]
            kept.update((int(inside[np.argmin(values)]), int(inside[np.argmax(values)])))
            places.append({axis: place[inside].mean() for axis, place in metric.at.items()})
            means.append(values.mean())
    at = {axis: np.array([place[axis] for place in places]) for axis in metric.at}
    return metric.take(np.array(sorted(kept))), Series(at, np.array(means))
