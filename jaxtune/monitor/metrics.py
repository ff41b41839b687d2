"""Metrics of a run, written to metrics.jsonl, TensorBoard, Weights & Biases and Aim."""

import contextlib
import importlib
import json
import pathlib
import reprlib
import uuid
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import numpy as np

from jaxtune.config.schema import AimOptions, LogOptions, WandbOptions
from jaxtune.errors import UserError
from jaxtune.whole_file import write_whole

_WANDB_ID, _AIM_HASH = "wandb_id.txt", "aim_hash.txt"
IDS = (_WANDB_ID, _AIM_HASH)
"""Files in the run folder that hold the ids of the run in wandb and Aim, so that a resumed run continues there."""
MOST = {"tokens": 1e18, "step_seconds": 1e9}
"""The largest plausible values of metrics that serve as the x axis of charts."""
_PACKAGES = {
    "tensorboardX": ("log.tensorboard", "pip install 'jaxtune[tensorboard]'"),
    "wandb": ("log.wandb.enabled", "pip install 'jaxtune[wandb]'"),
    "aim": ("log.aim.enabled", "pip install 'jaxtune[aim]'"),
}


class MetricsLog:
    """Appends the metrics of each step to the outputs that the config selects; only the main process writes.

    `metrics.jsonl` holds one JSON object per line, with `step` and the metrics of a training step, or of an evaluation
    after a step; the keys tell which (`loss`, `eval_loss`). Floats are written by `repr`, so equal lines mean equal
    bits; non-finite ones as `NaN`, `Infinity`, `-Infinity`, which Python's and most other readers understand.

    At the start, rows after `resume_step` are removed (all rows if it is 0), so that the file of a resumed run equals
    the file of an uninterrupted run. For this, an evaluation row must be written before its step is saved.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        log: LogOptions,
        run_name: str,
        config: Mapping[str, Any],
        resume_step: int,
        is_main: bool,
    ) -> None:
        self._file = self._tensorboard = self._wandb = self._aim = None
        self._wandb_every = log.wandb.every
        if not is_main:
            return
        folder.mkdir(parents=True, exist_ok=True)
        if log.jsonl:
            path = folder / "metrics.jsonl"
            cut(path, resume_step)
            self._file = path.open("a", encoding="utf-8")
        if log.tensorboard:
            module = _load("tensorboardX")
            # purge_step hides events that an earlier process wrote for this step and later ones.
            first = resume_step + 1 if resume_step else 0
            self._tensorboard = module.SummaryWriter(
                str(folder / "tensorboard"), purge_step=first, filename_suffix=f".from-{first}"
            )
        if log.wandb.enabled:
            self._wandb = _start_wandb(folder, log.wandb, run_name, config)
        if log.aim.enabled:
            self._aim = _start_aim(folder, log.aim, run_name, config)

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Append one row: numbers (Python's, numpy's, or 0-d arrays) and strings, with the step in front."""
        row = {"step": step} | {name: np.asarray(value).item() for name, value in metrics.items()}
        if self._file is not None:
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()  # the row is there even if the process is killed
        if self._tensorboard is not None:
            for name, value in row.items():
                if name != "step" and not isinstance(value, str):
                    self._tensorboard.add_scalar(name, value, step)
        if self._wandb is not None and (step % self._wandb_every == 0 or "loss" not in row):  # evaluations always
            self._wandb.log(row)
        if self._aim is not None:
            for name, value in row.items():
                if name != "step" and not isinstance(value, str):
                    self._aim.track(value, name=name, step=step)

    def close(self) -> None:
        """Flush and close all outputs."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # a full disk, for which `write` has already raised
                self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()
        if self._aim is not None:
            self._aim.close()


def check_outputs(log: LogOptions) -> None:
    """Raise UserError if the package of an output is missing, or wandb has no login.

    In a terminal wandb prompts for the login.
    """
    outputs = {"tensorboardX": log.tensorboard, "wandb": log.wandb.enabled, "aim": log.aim.enabled}
    for module in (module for module, wanted in outputs.items() if wanted):
        _load(module)
    if log.wandb.enabled:
        _check_wandb_login()


def read(path: pathlib.Path) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl, without a half-written last line.

    Raises UserError, with file and line, for a line that is not an object with a step, and for a metric that is neither
    a number nor a string, or is out of the range of MOST.
    """
    rows = read_rows(path)
    for line, row in enumerate(rows, start=1):
        for name, value in row.items():
            if not isinstance(value, int | float | str) or (isinstance(value, int) and value.bit_length() > 64):
                what = "not a number or a text" if not isinstance(value, int) else "a number of more than 64 bits"
                raise UserError(f"{path}, line {line}: {name} is {reprlib.repr(value)}, {what}")
            if name in MOST and (isinstance(value, str) or not 0 <= value <= MOST[name]):
                what = f"not a number from 0 to {MOST[name]:g}"
                raise UserError(f"{path}, line {line}: {name} is {reprlib.repr(value)}, {what}")
    return rows


def read_rows(path: pathlib.Path) -> list[dict[str, Any]]:
    """The rows of a file of JSON lines that have a step, without a half-written last line.

    Raises UserError, with file and line, for a line that is not an object with a step.
    """
    *lines, _half_written = path.read_bytes().split(b"\n")  # b"" if the last line is whole
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):  # RecursionError: nested too deep
            row = None
        if not isinstance(row, dict) or not isinstance(row.get("step"), int):
            raise UserError(
                f"{path}, line {number}: not a JSON object with a whole-number 'step'; repair or remove the file"
            )
        rows.append(row)
    return rows


def cut(path: pathlib.Path, resume_step: int) -> None:
    """Remove the rows after `resume_step` (all rows if it is 0) and a half-written last line, in one rename."""
    if not path.exists():
        return
    rows = [row for row in read_rows(path) if resume_step and row["step"] <= resume_step]
    write_whole(path, (json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def _check_wandb_login() -> None:
    """Log in as `wandb.init` would, without a request to the server."""
    wandb = _load("wandb")
    if wandb.setup().settings.mode in ("offline", "dryrun", "disabled"):
        return
    try:
        wandb.login(verify=False)
    except wandb.Error as error:
        todo = "run `wandb login`, set WANDB_API_KEY, or set WANDB_MODE=offline to log here only"
        raise UserError(f"log.wandb.enabled: wandb has no login: {todo} ({error})") from error


def _start_wandb(folder: pathlib.Path, options: WandbOptions, run_name: str, config: Mapping[str, Any]) -> Any:
    """A wandb run whose id is kept in the run folder, so that a resumed run continues it."""
    wandb = _load("wandb")
    id_file = folder / _WANDB_ID
    if not id_file.exists():
        id_file.write_text(uuid.uuid4().hex[:12])
    run = wandb.init(
        project=options.project,
        name=options.name or run_name,
        tags=list(options.tags),
        id=id_file.read_text().strip(),
        resume="allow",  # continues the run of this id, or begins one
        dir=str(folder),
        config=dict(config),
    )
    # Log the step as a metric: wandb's own step counter refuses the steps that a resumed run repeats.
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    return run


def _start_aim(folder: pathlib.Path, options: AimOptions, run_name: str, config: Mapping[str, Any]) -> Any:
    """An Aim run whose hash is kept in the run folder, so that a resumed run continues it."""
    aim = _load("aim")
    known = folder / _AIM_HASH
    before = known.read_text().strip() if known.exists() else None
    run = aim.Run(run_hash=before, repo=options.repo, experiment=options.experiment)
    known.write_text(run.hash)
    run.name = options.name or run_name
    run["config"] = json.loads(json.dumps(dict(config), default=str))
    return run


def _load(module: str) -> ModuleType:
    """Import a package that only one option needs."""
    option, install = _PACKAGES[module]
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(f"{option} needs the package {module}: {install}") from error
