"""Make one HTML page of one or several runs: curves, numbers, samples, and the options that differ.

    python -m jaxtune.report runs/quickstart
    python -m jaxtune.report runs/one runs/another --output=compared.html

Completions that several runs sampled for the same prompt are side by side, at the last step at which they had the same.
The page is self-contained and needs no network. It is written to RUN/report.html for one run, to report.html for
several, or to --output. A run that has not ended yet is shown up to its last step.
"""

import dataclasses
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import flags

from jaxtune import command
from jaxtune.config.loading import as_dict, from_json, to_json
from jaxtune.config.schema import Config, Dataset
from jaxtune.errors import UserError
from jaxtune.host.run_folder import RunFolder
from jaxtune.monitor import metrics, step_time
from jaxtune.monitor.page import GENERATOR, Record, flat, of_some_steps, page
from jaxtune.monitor.profiler import trace_folder
from jaxtune.monitor.step_time import StepTime

NAME = "report.html"
MOST_METRICS = 1000  # of one run; each metric is a chart


def main(argv: list[str] | None = None) -> int:
    """Write the page; return the exit code."""
    return command.run_with_words(_define_flags, lambda values, runs: _main(runs, values.output), argv)


def read_record(folder: RunFolder, name: str) -> Record:
    """Read the files that a run has written so far.

    Raises:
        UserError: The folder is not a run folder or has no metrics, or a file is damaged.
    """
    if not folder.config.is_file() and (inside := sorted(path.parent for path in folder.path.glob("*/metrics.jsonl"))):
        listed = " ".join(shlex.quote(str(path)) for path in inside)
        raise UserError(f"{folder.path} is not a run folder, but has some: python -m jaxtune.report {listed}")
    config = folder.read_config()
    if not folder.metrics.is_file():
        why = "no step has ended yet" if config.log.jsonl else "log.jsonl is off"
        raise UserError(f"{folder.path} has no metrics.jsonl: {why}")
    rows = metrics.read(folder.metrics)
    if not any(len(row) > 1 for row in rows):
        raise UserError(f"{folder.metrics} is empty: no step has ended yet")
    if (count := len({name for row in rows for name in row} - {"step"})) > MOST_METRICS:
        raise UserError(f"{folder.metrics} has {count:,} metrics, and a page shows at most {MOST_METRICS:,}")
    counts = dataclasses.asdict(counted) if (counted := folder.read_counts()) else {}
    completions = folder.read_completions()
    samples = [*of_some_steps(completions), *folder.read_samples()]
    return Record(name, _options(config), rows, counts, samples, completions, _step_time(folder, config))


def _step_time(folder: RunFolder, config: Config) -> StepTime | None:
    file = trace_folder(folder.path, config.prof) / step_time.NAME
    if not file.is_file():
        return None
    try:
        return StepTime.read(file)
    except UserError as error:
        raise UserError(f"{error}; remove it to make the report without it") from error


def _options(config: Config) -> dict[str, Any]:
    """Return the options by key, without the run's name.

    Datasets show only values that differ from the default, because runs have different numbers of datasets.
    """
    values, default = as_dict(from_json(to_json(config))), dataclasses.asdict(Dataset())
    for name in ("datasets", "eval_datasets"):
        entries = values["data"][name]
        values["data"][name] = [{key: each[key] for key in each if each[key] != default[key]} for each in entries]
    options = flat(values)
    del options["train.run_name"]
    return options


def _define_flags(values: flags.FlagValues) -> None:
    flags.DEFINE_string("output", None, "file to write", flag_values=values)


def _main(runs: Sequence[str], output: str | None) -> None:
    if not runs:
        raise UserError(
            "no run given: python -m jaxtune.report RUN ..., each the folder of a run, such as runs/quickstart"
        )
    paths = [Path(run) for run in runs]
    if repeated := [
        run for run, path in zip(runs, paths) if sum(path.resolve() == each.resolve() for each in paths) > 1
    ]:
        raise UserError(f"{' and '.join(repeated)}: the same run; name each run once")
    last_parts = [path.resolve().name for path in paths]
    # Runs in different folders may have the same name.
    names = last_parts if len(set(last_parts)) == len(paths) else list(runs)
    records = [read_record(RunFolder(path), name) for path, name in zip(paths, names)]
    file = Path(output) if output else (paths[0] if len(paths) == 1 else Path()) / NAME
    if file.is_file() and GENERATOR not in file.read_text(encoding="utf-8", errors="replace")[:2000]:
        raise UserError(f"--output={file} is another file; name a new one")
    file.write_text(page(records, _options(Config())), encoding="utf-8")
    print(f"report: {file}")


if __name__ == "__main__":
    sys.exit(main())
