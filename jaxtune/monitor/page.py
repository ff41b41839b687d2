"""A self-contained HTML page about runs: charts, numbers, samples, and the options that differ."""

import base64
import datetime
import hashlib
import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from jaxtune.monitor.series import AXES, Row, Series, series, summary, thin
from jaxtune.monitor.step_time import StepTime

MOST_POINTS = 1200  # per line; charts are at most about a thousand pixels wide
GENERATOR = "jaxtune report"
"""The page's <meta name="generator">."""

_FILES = Path(__file__).with_name("report_page")
# The objective's metrics come first on the page, and among them these; then the groups below, by heading.
_FIRST = ("loss", "eval_loss", "reward", "eval_reward")
_GROUPS = {
    "Learning rate and gradients": ("learning_rate", "grad_norm", "loss_scale", "bad_steps"),
    "Throughput and memory": ("tokens_per_second", "step_seconds", "mfu", "peak_memory_bytes"),
    "Progress": ("epoch", "tokens", "target_tokens"),
}
# Drawn without smoothing: settings and counts do not scatter around a mean.
_EXACT = ("learning_rate", "loss_scale", "bad_steps", "peak_memory_bytes", *_GROUPS["Progress"])
_NO_VALUE = "-"


@dataclass(frozen=True)
class Record:
    """The data of one run for the page.

    Attributes:
        name: The run's name on the page; unique there.
        options: By key; a missing key is not set.
        rows: Rows of metrics.jsonl.
        counts: Numbers of documents and tokens; empty for a stream.
        samples: Texts that the model wrote: step, prompt, text, and reward if the run has reward functions.
        completions: Rows of completions.jsonl, to compare with other runs.
        step_time: From the last profile, if there is one.
    """

    name: str
    options: Mapping[str, Any]
    rows: Sequence[Row]
    counts: Mapping[str, float] = field(default_factory=dict)
    samples: Sequence[Mapping[str, Any]] = ()
    completions: Sequence[Row] = ()
    step_time: StepTime | None = None


def page(records: Sequence[Record], defaults: Mapping[str, Any], most: int = MOST_POINTS) -> str:
    """The HTML page of some runs. The options of a single run are compared with the defaults.

    Data of a run never becomes markup: names, options and samples are in one block of JSON without any `<`, and the
    page's script shows them as text. By the content security policy a browser runs only that script, by its hash.
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
        # </script> in a sample would end the block.
        "data": json.dumps(contents(records, defaults, most), allow_nan=False).replace("<", "\\u003c"),
    }
    template = (_FILES / "page.html").read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda place: parts[place[1]], template)


def contents(records: Sequence[Record], defaults: Mapping[str, Any], most: int = MOST_POINTS) -> dict[str, Any]:
    """The page's data, for JSON. Non-finite numbers are strings: `NaN`, `Infinity`, `-Infinity`."""
    metrics = [series(record.rows) for record in records]
    axes = [axis for axis in AXES if all(axis in next(iter(of_run.values())).at for of_run in metrics if of_run)]
    charts = [
        {
            "group": group,
            "metric": name,
            "exact": name in _EXACT,
            "lines": [_line(of_run[name], axes, most) if name in of_run else None for of_run in metrics],
        }
        for group, name in group_metrics(list(dict.fromkeys(name for of_run in metrics for name in of_run)))
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
            {"run": run, "rows": record.step_time.rows(), "said": record.step_time.caption()}
            for run, record in enumerate(records)
            if record.step_time is not None
        ],
        "options": {"columns": columns, "rows": differences(options)},
        "completions": compare_completions({record.name: record.completions for record in records}),
        "samples": [
            {"run": run, **_plain(sample)}
            for run, record in enumerate(records)
            for sample in [*record.samples, *_texts(record)]
        ],
    }


def group_metrics(names: Sequence[str]) -> list[tuple[str, str]]:
    """(heading, metric) in the order of the page: losses, the objective's other metrics, then common metrics."""
    in_groups = {name for group in _GROUPS.values() for name in group}
    of_objective = [name for name in names if name not in in_groups]
    ordered = [name for name in _FIRST if name in of_objective] + [name for name in of_objective if name not in _FIRST]
    groups = {"Objective": ordered} | _GROUPS
    return [(heading, name) for heading, group in groups.items() for name in group if name in names]


def of_some_steps(completions: Sequence[Row], most: int = 6) -> list[dict[str, Any]]:
    """Samples for the page: completions with the highest and the lowest reward, of `most` steps from first to last.

    Without rewards, the first completion of each of these steps.
    """
    steps = sorted({each["step"] for each in completions})
    chosen = [steps[round(i)] for i in np.linspace(0, len(steps) - 1, min(most, len(steps)))]  # with both ends
    samples = []
    for step in chosen:
        ordered = sorted(
            (each for each in completions if each["step"] == step), key=lambda each: -each.get("reward", 0.0)
        )
        best, worst = ordered[0], ordered[-1]
        samples += [best, worst] if best.get("reward", 0.0) > worst.get("reward", 0.0) else [best]
    return [
        {"step": each["step"], "prompt": _as_text(each["prompt"]), "text": _as_text(each["completion"])}
        | ({"reward": each["reward"]} if "reward" in each else {})
        for each in samples
    ]


def compare_completions(completions: Mapping[str, Sequence[Row]]) -> dict[str, Any]:
    """Completions of several runs side by side, from the last step at which all runs have the same prompt.

    Runs without completions are left out. Empty if fewer than two have any, or no step has the same prompt.

    Returns:
        step, prompt, columns (the runs), rows of one completion a run, with its reward; the highest rewards first.
    """
    of_runs = {run: rows for run, rows in completions.items() if rows}
    asked = [{(row["step"], _as_text(row["prompt"])) for row in rows} for rows in of_runs.values()]
    if len(of_runs) < 2 or not (shared := set.intersection(*asked)):
        return {}
    step, prompt = max(shared)

    def reward(row: Row) -> float:
        known = row.get("reward", 0.0)
        return -math.inf if math.isnan(known) else known

    def texts(rows: Sequence[Row]) -> list[str]:
        group = [row for row in rows if (row["step"], _as_text(row["prompt"])) == (step, prompt)]
        ordered = sorted(group, key=reward, reverse=True)
        rewards = (f"reward {row['reward']:.4g}\n" if "reward" in row else "" for row in ordered)
        return [reward + _as_text(row["completion"]) for reward, row in zip(rewards, ordered)]

    rows = itertools.zip_longest(*map(texts, of_runs.values()), fillvalue=_NO_VALUE)
    return {"step": step, "prompt": prompt, "columns": list(of_runs), "rows": [list(row) for row in rows]}


def differences(options: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """[key, one value per config] of the options that differ, sorted by key."""
    keys = sorted({key for each in options for key in each})
    rows = [[key, *(_as_text(each[key]) if key in each else _NO_VALUE for each in options)] for key in keys]
    return [row for row in rows if len(set(row[1:])) > 1]


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested options: keys such as `optim.learning_rate` and `data.datasets[0].path`; no empty lists."""
    options: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping):
            options |= flat(value, f"{key}.")
        elif isinstance(value, list | tuple) and all(isinstance(each, Mapping) for each in value):
            for index, each in enumerate(value):
                options |= flat(each, f"{key}[{index}].")
        else:
            options[key] = value
    return options


def _line(metric: Series, axes: Sequence[str], most: int) -> dict[str, Any]:
    drawn, smooth = thin(metric, most)
    line: dict[str, Any] = {"summary": _plain(summary(metric)), "drawn": _points(drawn, axes)}
    return line if smooth is drawn else line | {"smooth": _points(smooth, axes)}


def _points(metric: Series, axes: Sequence[str]) -> dict[str, list[float | str]]:
    columns = {axis: metric.at[axis] for axis in axes} | {"values": metric.values}
    return {name: [_plain(_short(value)) for value in column] for name, column in columns.items()}


def _short(value: np.floating) -> float:
    """Round to the digits of a float32; whole numbers stay exact."""
    return float(value) if float(value).is_integer() else float(f"{value:.7g}")


def _plain(value: Any) -> Any:
    """Convert for JSON: non-finite numbers to strings, whole numbers to int."""
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _totals(record: Record) -> dict[str, Any]:
    """The totals of a run: model, steps, tokens, time."""
    last = record.rows[-1]["step"]
    totals: dict[str, Any] = {"model": record.options.get("model.path"), "steps": last}
    if tokens := [row["tokens"] for row in record.rows if "tokens" in row]:
        totals["tokens"] = tokens[-1]
    if (seconds := sum(row.get("step_seconds", 0.0) for row in record.rows)) > 1e-9:
        totals["time in steps"] = str(datetime.timedelta(seconds=round(seconds)))
        totals["tokens per second, on average"] = round(totals.get("tokens", 0) / seconds)
    return totals


def _table(columns: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """[name, one value per column] of every name in any column."""
    names = dict.fromkeys(name for column in columns for name in column)
    return [
        [name, *(_format_number(column[name]) if name in column else _NO_VALUE for column in columns)] for name in names
    ]


def _format_number(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}" if isinstance(value, float) else f"{value}"


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _texts(record: Record) -> list[dict[str, Any]]:
    """Metrics that are strings, as samples."""
    return [
        {"step": row["step"], "prompt": name, "text": value}
        for row in record.rows
        for name, value in row.items()
        if isinstance(value, str)
    ]


def _digest(text: str) -> str:
    """The hash by which a content security policy allows an inline script or style."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
