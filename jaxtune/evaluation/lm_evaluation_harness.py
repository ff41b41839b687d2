"""Benchmark tasks of EleutherAI's lm-evaluation-harness, answered by the decoder of a run or of any model.

The harness makes the requests and computes the metrics; `decoder_lm` answers the requests. It needs the optional
package lm-eval, so import this file only when it is used.
"""

import contextlib
import dataclasses
import difflib
import json
import logging
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, partialmethod
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from tqdm import tqdm

from jaxtune.config.schema import Config, DataOptions
from jaxtune.errors import UserError
from jaxtune.evaluation.validation import EvaluatedModel, open_evaluated_model, tokenizer_home
from jaxtune.host.missing_kernels import explain_missing_kernels
from jaxtune.host.run_folder import RunFolder
from jaxtune.inference.answers import open_model
from jaxtune.precision.options import PrecisionOptions
from jaxtune.training.memory import explain_out_of_memory

try:
    from lm_eval import evaluator
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.loggers.utils import get_commit_from_path
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import handle_non_serializable, make_table

    from jaxtune.evaluation.decoder_lm import DecoderLM
except ImportError as error:
    raise UserError(
        f"--tasks needs a package that is not installed ({error}): pip install 'jaxtune[lm-eval]'"
    ) from error


log = logging.getLogger("jaxtune")

# For the standard error of a perplexity; 1,000 samples put it 2% off. The harness draws 100,000, in extra processes.
BOOTSTRAP_SAMPLES = 1000


@dataclass(frozen=True)
class EvalRequest:
    """Options of an evaluation, named as on the harness's own command line.

    Attributes:
        tasks: Names of tasks, groups or tags, or patterns such as mmlu_*.
        num_fewshot: Examples before each question; None: the task's own number.
        limit: Maximum number of questions per task; below 1, a fraction of the task's questions.
        include_path: A folder with YAML files of further tasks.
        apply_chat_template: Whether to format requests with the tokenizer's chat template, few-shot examples as turns.
    """

    tasks: tuple[str, ...]
    num_fewshot: int | None = None
    limit: float | None = None
    include_path: str | None = None
    apply_chat_template: bool = False

    def __post_init__(self) -> None:
        if self.num_fewshot is not None and self.num_fewshot < 0:
            raise UserError(f"--num_fewshot={self.num_fewshot}: must be at least 0")
        if self.limit is not None and not self.limit > 0:
            raise UserError(f"--limit={self.limit:g}: must be more than 0: a number of questions or, below 1, a share")
        if self.include_path is not None and not Path(self.include_path).is_dir():
            raise UserError(f"--include_path={self.include_path}: is not a folder")


@explain_missing_kernels()
def run_tasks(
    request: EvalRequest,
    config: Config | None,
    mesh: jax.sharding.Mesh,
    run: str | None,
    step: int | None,
    name: str | None,
) -> tuple[dict[str, Any], int | None]:
    """Run benchmark tasks; return the harness's own results and the run's step.

    `results` in the first holds each task's metrics by name.

    Args:
        request: The tasks and their options.
        config: Options of the computation; None: open `name` as `jaxtune.generate` does.
        mesh: The devices, all of one process.
        run: The folder of the run whose model is evaluated.
        step: The run's checkpoint; None: the newest good one.
        name: A model to evaluate instead of a run's: a Hugging Face folder, hub id or adapter. With neither `run` nor
            `name`, the config's base model is evaluated.

    Raises:
        UserError: A task does not exist, cannot be loaded or cannot be run; the model is a classifier; or for the
            reasons of `validation.evaluate`.
    """
    tasks = load_tasks(request)  # first, so that a task that cannot be loaded fails before the weights are read
    with explain_out_of_memory(config or Config()):
        opened, home = _open(config, mesh, run, step, name)
        results = score_tasks(DecoderLM(opened, home, mesh, chat=request.apply_chat_template), request, tasks)
    run_args = None if run is None else {"run": Path(run).name, "step": opened.step}
    results["config"] |= {"model": "jaxtune", "model_args": run_args or {"model": name or opened.config.model.path}}
    return results, opened.step


def load_tasks(request: EvalRequest) -> "LoadedTasks":
    """Load benchmark tasks with their data. Raises UserError as `run_tasks`."""
    if jax.process_count() > 1:
        raise UserError(f"--tasks: runs in one process, and there are {jax.process_count()}; start a single process")
    manager = _Tasks(include_path=request.include_path)
    names = _names(request.tasks, manager)
    tasks = manager.load(names)["tasks"].values()
    for task in tasks:
        # As the harness does, which would warn each time. A task that sets it to 0 has no examples to show.
        if request.num_fewshot is not None and task.get_config("num_fewshot") != 0:
            task.set_config(key="num_fewshot", value=request.num_fewshot)
    generating = [task for task in tasks if task.OUTPUT_TYPE == "generate_until"]
    return LoadedTasks(manager, names, [task.get_config("generation_kwargs") or {} for task in generating])


def score_tasks(lm: DecoderLM, request: EvalRequest, tasks: "LoadedTasks") -> dict[str, Any]:
    """Let the harness score a model by tasks; return its own results, as `run_tasks`. May be called repeatedly."""
    # The harness's bootstrap would fork this process, whose threads hold locks.
    os.environ.setdefault("DISABLE_MULTIPROC", "1")
    evaluate: Any = simple_evaluate  # its decorator hides the signature from type checkers
    with _quiet(), _keep_random_state():
        return evaluate(
            model=lm,
            tasks=tasks.names,
            limit=request.limit,
            bootstrap_iters=BOOTSTRAP_SAMPLES,
            log_samples=False,
            apply_chat_template=request.apply_chat_template,
            fewshot_as_multiturn=request.apply_chat_template,
            task_manager=tasks.manager,
            torch_random_seed=None,  # nothing here uses torch
        )


@contextlib.contextmanager
def _keep_random_state() -> Iterator[None]:
    """Restore the random states of Python and numpy, which the harness seeds; reward functions may read them."""
    of_python, of_numpy = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Show only progress bars that take over a second, and keep the harness from running git for its version.

    Outside a repository, git would print a fatal error.
    """
    bar, version = vars(tqdm)["__init__"], evaluator.get_git_commit_hash  # as an attribute, a bound copy of itself
    tqdm.__init__ = partialmethod(bar, delay=1)  # type: ignore[method-assign, assignment]
    evaluator.get_git_commit_hash = partial(get_commit_from_path, Path.cwd())
    try:
        yield
    finally:
        tqdm.__init__, evaluator.get_git_commit_hash = bar, version


def _open(
    config: Config | None, mesh: jax.sharding.Mesh, run: str | None, step: int | None, name: str | None
) -> tuple[EvaluatedModel, Path]:
    """Return the model and the folder of its tokenizer; the arguments are those `run_tasks` takes."""
    if config is None:
        assert name is not None
        if RunFolder(Path(name)).checkpoints.is_dir():
            raise UserError(f"--model={name} is a run folder; use --run={name}")
        model = open_model(name, mesh, step=step)
        precision = PrecisionOptions("fp32" if model.config.model.dtype == "float32" else "bf16")
        # A model that is not trained has no row length or batch size, so take those of the default config.
        plain = dataclasses.replace(model.config, data=DataOptions(), precision=precision)
        opened, home = EvaluatedModel(plain, model.model, {}, model.parameters, {}, None), model.home
    else:
        opened = open_evaluated_model(config, mesh, run, step, name, reference=False)
        home = tokenizer_home(opened.model, opened.config, name)
    if opened.config.model.head != "lm":
        raise UserError("--tasks: the model is a classifier, and benchmark tasks need text and its probability")
    return opened, home


def metrics_of(results: Mapping[str, Any]) -> dict[str, float]:
    """Return all metrics of tasks and groups, named TASK/METRIC, or TASK/METRIC,FILTER for a filter but `none`."""
    rows = {**results["results"], **results.get("groups", {})}
    return {
        f"{task}/{metric.removesuffix(',none')}": float(value)
        for task, row in rows.items()
        for metric, value in row.items()
        if "," in metric and isinstance(value, int | float | np.number)
    }


def table(results: Mapping[str, Any]) -> str:
    """Return the table of results that the harness prints, then its table of groups if it has any."""
    columns = ["results", *(["groups"] if "groups" in results else [])]
    return "\n".join(str(make_table(results, column)) for column in columns)


def write(results: Mapping[str, Any], path: Path) -> None:
    """Write the results as JSON, in the harness's own form."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(results, indent=2, default=handle_non_serializable, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


class _Tasks(TaskManager):
    """The harness's tasks, loaded once. Raises UserError for a task that cannot be loaded or run here."""

    _loaded: Any = None

    def load(self, task_list: Any) -> Any:
        """Load the tasks with these names, or return those loaded before; `simple_evaluate` calls this again."""
        if self._loaded is None:
            self._loaded = self._load(task_list)
        return self._loaded

    def _load(self, task_list: list[str]) -> Any:
        try:
            loaded = super().load(task_list)
        except Exception as error:  # from a dataset, the hub or the task's own code
            raise UserError(
                f"--tasks={','.join(task_list)}: cannot be loaded: {type(error).__name__}: {error}. The dataset must "
                "be in the cache, or the hub reachable"
            ) from error
        for name, task in loaded["tasks"].items():
            if getattr(task, "UNSAFE_CODE", False):
                raise UserError(f"--tasks: {name} runs code that the model writes, which is not supported")
            if getattr(task, "MULTIMODAL", False):
                raise UserError(f"--tasks: {name} has images or sound, and only text tasks are supported")
        return loaded


class LoadedTasks(NamedTuple):
    """Tasks of the harness, with their data.

    Attributes:
        manager: holds them.
        names: of the tasks and groups.
        generations: the generation_kwargs of tasks that generate text.
    """

    manager: _Tasks
    names: list[str]
    generations: list[Mapping[str, Any]]


def _names(patterns: Sequence[str], manager: TaskManager) -> list[str]:
    """Return the task names that match the patterns. Raises UserError for a pattern that matches none."""
    names: dict[str, None] = {}
    for pattern in patterns:
        matching = manager.match_tasks([pattern])
        if not matching:
            near = difflib.get_close_matches(pattern, manager.all_tasks, n=1)
            nearest = f"nearest: {near[0]}" if near else "`lm-eval ls tasks` lists the harness's tasks"
            raise UserError(f"--tasks: {pattern!r} is not a task of lm-eval, nor of --include_path; {nearest}")
        names |= dict.fromkeys(matching)
    return list(names)
