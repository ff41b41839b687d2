"""Runs as one HTML page, which holds all that it needs: charts, numbers, samples, and the options that differ."""

import base64
import datetime
import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from jaxtune.monitor.series import AXES, Row, Series, series, summary, thinned
from jaxtune.monitor.step_time import StepTime

MOST_POINTS = 1200  # of a line; charts are at most about a thousand pixels wide
GENERATOR = "jaxtune report"
"""What a page says in its head about who made it."""

_FILES = Path(__file__).with_name("report_page")
# By heading, the metrics that are not the objective's own; those come first, of which these begin.
_FIRST = ("loss", "eval_loss", "reward", "eval_reward")
_GROUPS = {
    "Learning rate and gradients": ("learning_rate", "grad_norm", "loss_scale", "bad_steps"),
    "Throughput and memory": ("tokens_per_second", "step_seconds", "mfu", "peak_memory_bytes"),
    "Progress": ("epoch", "tokens", "target_tokens"),
}
# Drawn as they are: what a step sets or counts is not scattered around a mean.
_EXACT = ("learning_rate", "loss_scale", "bad_steps", "peak_memory_bytes", *_GROUPS["Progress"])
_NO_VALUE = "-"


@dataclass(frozen=True)
class Record:
    """What a run has written.

    Attributes:
        name: What it is called on the page, which no other run of the page is.
        options: By key; one that is not there is not set.
        rows: Of metrics.jsonl.
        counts: Of documents and tokens; a stream has none.
        samples: What the model wrote: step, prompt, text, and its reward where it learns from rewards.
        step_time: Of its last profile, if it has one.
    """

    name: str
    options: Mapping[str, Any]
    rows: Sequence[Row]
    counts: Mapping[str, float] = field(default_factory=dict)
    samples: Sequence[Mapping[str, Any]] = ()
    step_time: StepTime | None = None


def page(records: Sequence[Record], defaults: Mapping[str, Any], most: int = MOST_POINTS) -> str:
    """The page of some runs. One run is compared with the default options.

    Nothing that a run holds is markup: names, options and samples are in one block of JSON, in which no `<` is left,
    and the page's script shows them as text. A browser runs that script alone, by its hash.
    """
    style, script = ((_FILES / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    policy = [
        "default-src 'none'",
        f"style-src '{_digest(style)}'",
        f"script-src '{_digest(script)}'",
        "base-uri 'none'",
        "form-action 'none'",
    ]
    parts = {
        "policy": "; ".join(policy),
        "generator": GENERATOR,
        "style": style,
        "script": script,
        "data": json.dumps(contents(records, defaults, most), allow_nan=False).replace("<", "\\u003c"),
    }
    template = (_FILES / "page.html").read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda place: parts[place[1]], template)


def contents(records: Sequence[Record], defaults: Mapping[str, Any], most: int = MOST_POINTS) -> dict[str, Any]:
    """All that the page shows, as JSON. A number that is not finite is a text: `NaN`, `Infinity`, `-Infinity`."""
    metrics = [series(record.rows) for record in records]
    axes = [axis for axis in AXES if all(axis in next(iter(found.values())).at for found in metrics if found)]
    charts = [
        {
            "group": group,
            "metric": name,
            "exact": name in _EXACT,
            "lines": [_line(found[name], axes, most) if name in found else None for found in metrics],
        }
        for group, name in grouped(list(dict.fromkeys(name for found in metrics for name in found)))
    ]
    columns = [record.name for record in records]
    options = [record.options for record in records]
    if len(records) == 1:
        columns, options = [*columns, "default"], [*options, defaults]
    return {
        "runs": [record.name for record in records],
        "axes": axes,
        "charts": charts,
        "totals": _table([_totals(record) for record in records]),
        "counts": _table([record.counts for record in records]),
        "step_times": [
            {"run": run, "rows": record.step_time.rows(), "said": record.step_time.said()}
            for run, record in enumerate(records)
            if record.step_time is not None
        ],
        "options": {"columns": columns, "rows": differences(options)},
        "samples": [
            {"run": run, **_plain(sample)}
            for run, record in enumerate(records)
            for sample in [*record.samples, *_texts(record)]
        ],
    }


def grouped(names: Sequence[str]) -> list[tuple[str, str]]:
    """(heading, metric) in the order of the page: losses, the objective's other metrics, then what every run has."""
    elsewhere = {name for group in _GROUPS.values() for name in group}
    own = [name for name in names if name not in elsewhere]
    ordered = [name for name in _FIRST if name in own] + [name for name in own if name not in _FIRST]
    groups = {"Objective": ordered} | _GROUPS
    return [(heading, name) for heading, group in groups.items() for name in group if name in names]


def of_some_steps(completions: Sequence[Row], most: int = 6) -> list[dict[str, Any]]:
    """As samples, the completions with the highest and the lowest reward of some steps, from the first to the last."""
    steps = sorted({each["step"] for each in completions})
    chosen = [steps[round(i)] for i in np.linspace(0, len(steps) - 1, min(most, len(steps)))]
    found = []
    for step in chosen:
        ordered = sorted((each for each in completions if each["step"] == step), key=lambda each: -each["reward"])
        found += [ordered[0], ordered[-1]] if ordered[0]["reward"] > ordered[-1]["reward"] else ordered[:1]
    return [
        {"step": each["step"], "prompt": _shown(each["prompt"]), "text": each["completion"], "reward": each["reward"]}
        for each in found
    ]


def differences(options: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """[key, a value each] of the options that are not the same in all, by key."""
    keys = sorted({key for each in options for key in each})
    rows = [[key, *(_shown(each[key]) if key in each else _NO_VALUE for each in options)] for key in keys]
    return [row for row in rows if len(set(row[1:])) > 1]


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested options by key, such as `optim.learning_rate` and `data.datasets[0].path`, without empty lists."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping):
            found |= flat(value, f"{key}.")
        elif isinstance(value, list | tuple) and all(isinstance(each, Mapping) for each in value):
            for index, each in enumerate(value):
                found |= flat(each, f"{key}[{index}].")
        else:
            found[key] = value
    return found


def _line(metric: Series, axes: Sequence[str], most: int) -> dict[str, Any]:
    drawn, smooth = thinned(metric, most)
    line: dict[str, Any] = {"summary": _plain(summary(metric)), "drawn": _points(drawn, axes)}
    return line if smooth is drawn else line | {"smooth": _points(smooth, axes)}


def _points(metric: Series, axes: Sequence[str]) -> dict[str, list[float | str]]:
    columns = {axis: metric.at[axis] for axis in axes} | {"values": metric.values}
    return {name: [_plain(_short(value)) for value in column] for name, column in columns.items()}


def _short(value: np.floating) -> float:
    """As it is, if whole; otherwise with the digits that a float32 has."""
    return float(value) if float(value).is_integer() else float(f"{value:.7g}")


def _plain(value: Any) -> Any:
    """As JSON has it: what is not finite as text, whole numbers without a point."""
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _totals(record: Record) -> dict[str, Any]:
    """What a run comes to, in a line each."""
    last = record.rows[-1]["step"]
    totals: dict[str, Any] = {"model": record.options.get("model.path"), "steps": last}
    if tokens := [row["tokens"] for row in record.rows if "tokens" in row]:
        totals["tokens"] = tokens[-1]
    if (seconds := sum(row.get("step_seconds", 0.0) for row in record.rows)) > 1e-9:
        totals["time in steps"] = str(datetime.timedelta(seconds=round(seconds)))
        totals["tokens a second, on average"] = round(totals.get("tokens", 0) / seconds)
    return totals


def _table(columns: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """[name, a value each] of everything that one of them has."""
    names = dict.fromkeys(name for column in columns for name in column)
    return [[name, *(_counted(column[name]) if name in column else _NO_VALUE for column in columns)] for name in names]


def _counted(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}" if isinstance(value, float) else f"{value}"


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _texts(record: Record) -> list[dict[str, Any]]:
    """Metrics that are texts."""
    return [
        {"step": row["step"], "prompt": name, "text": value}
        for row in record.rows
        for name, value in row.items()
        if isinstance(value, str)
    ]


def _digest(text: str) -> str:
    """What a content security policy calls an inline script or style by."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
