"""The Python API of jaxtune, as for notebooks: `train`, the config of a run, and the finished `Run`.

    import jaxtune

    run = jaxtune.train("qwen_lora:my/model", optim={"learning_rate": 1e-4})
    run.last["loss"], run.model, run.generate(["Once"]), run.evaluate()

Errors that a command would print are raised as `jaxtune.UserError`.
"""

import contextlib
import dataclasses
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict

from jaxtune.checkpoint import CheckpointManager
from jaxtune.config import keys
from jaxtune.config.loading import as_dict
from jaxtune.config.recipe import Recipe, read_recipe
from jaxtune.config.schema import Config
from jaxtune.config.typed_values import from_text, to_plain
from jaxtune.errors import UserError
from jaxtune.evaluation.validation import evaluate
from jaxtune.host import process
from jaxtune.host.missing_kernels import explain_missing_kernels
from jaxtune.host.run_folder import RunFolder, run_folder
from jaxtune.inference.answers import AnswerGenerator, mesh_of, open_model
from jaxtune.inference.sampling import SamplingOptions
from jaxtune.monitor import metrics
from jaxtune.monitor.series import Series, series
from jaxtune.parallel.layout import RULES
from jaxtune.parallel.mesh import make_mesh
from jaxtune.train import train as train_config
from jaxtune.weights.architecture import count_parameters

_OPTION = re.compile(r"--config\.(\w+)\.(\w+(?:\.\w+)*)(?:=('[^']*'|[\w./-]*\w))?")  # a setting as a command takes it


def train(recipe: str | Path | Config | ConfigDict, *, dialect: str | None = None, **sections: Any) -> "Run":
    """Train by a recipe, or continue its run: `run = jaxtune.train("quickstart", optim={"learning_rate": 1e-4})`.

    Args:
        recipe: As for `config_of`: NAME or FILE, either with :ARGUMENT, or a config.
        dialect: The system that a YAML file was written for; None: its keys tell.
        **sections: Options by their section, as dicts.

    Returns:
        The run: its `folder`, whether it is `finished`, `last` metrics, `generate(prompts)`, `evaluate()`.

    Raises:
        UserError: If the command would print an error.
    """
    config = config_of(recipe, dialect=dialect, **sections)
    with restore_mesh():
        finished = train_config(config)
    return Run(run_folder(config).path.absolute(), finished)


# Importing the module jaxtune.train has given the package an attribute of this name: the module. Callers want the
# function.
vars(sys.modules["jaxtune"])["train"] = train


def config_of(recipe: str | Path | Config | ConfigDict, *, dialect: str | None = None, **sections: Any) -> Config:
    """Return the checked config of a recipe with changed options: `config_of("qwen_lora", lora={"rank": 64})`.

    Args:
        recipe: A recipe as for --config: NAME or FILE, either with :ARGUMENT; or a config, to change or to check.
        dialect: The system that a YAML file was written for; None: recognised by its keys.
        **sections: Options by their section, as dicts; they count as typed on the command line.

    Raises:
        UserError: There is no such recipe, options are unknown, have wrong types or contradict each other, or an option
            given here has no effect.
    """
    settings = dict(keys.flatten_options(to_plain(sections)))
    if isinstance(recipe, str | Path):
        name, _, argument = recipe.partition(":") if isinstance(recipe, str) else (str(recipe), "", "")
        read = read_recipe(name, argument or None, dialect)
        return read.resolve_named(settings.items(), by="call", count=count_parameters)
    if dialect is not None:
        raise UserError(f"dialect={dialect!r}: has no effect: it is not a YAML file")
    if isinstance(recipe, ConfigDict):
        return Recipe("config", recipe).resolve(settings.items(), by="call", count=count_parameters)
    if not isinstance(recipe, Config):
        raise UserError(f"a recipe, its file, a Config or a ConfigDict is expected, not {type(recipe).__name__}")
    written = ConfigDict(as_dict(recipe), type_safe=False)
    resolved = Recipe("config", written, notes=recipe.notes).resolve(
        settings.items(), by="call", count=count_parameters
    )
    # Options that had no effect are not among those resolved now, but remain on record.
    left_out = [said for said in recipe.said if said.moot]
    return dataclasses.replace(resolved, said=(*left_out, *resolved.said)) if settings else recipe


@dataclass(frozen=True)
class Run:
    """A run, as `jaxtune.train` returns it. Its methods run the Python files that its config names, as training did.

    Attributes:
        folder: The run's folder.
        finished: Whether the run has reached its end. A run that was stopped is not finished, and resumes if it is
            trained again.
    """

    folder: Path
    finished: bool

    @property
    def config(self) -> Config:
        """All options of the run."""
        return RunFolder(self.folder).read_config()

    @property
    def metrics(self) -> dict[str, Series]:
        """Each metric by name: its `values`, and their positions `at["step"]`, `at["tokens"]` and `at["hours"]`.

        Raises UserError if log.jsonl is off.
        """
        file = RunFolder(self.folder).metrics
        if not file.is_file():
            raise UserError(f"{self.folder} has no {file.name}: log.jsonl is off")
        return series(metrics.read(file))

    @property
    def last(self) -> dict[str, float]:
        """The last value of each metric."""
        return {name: float(metric.values[-1]) for name, metric in self.metrics.items()}

    @property
    def model(self) -> Path | None:
        """The Hugging Face folder or adapter that the run exported; None without an export."""
        folder = RunFolder(self.folder)
        return folder.export if folder.is_exported else None

    @explain_missing_kernels()
    def generate(
        self,
        prompts: str | Sequence[str | Sequence[Mapping[str, Any]]],
        *,
        step: int | None = None,
        mesh: Mapping[str, int] | None = None,
        **manner: Any,
    ) -> list[str]:
        """Continue prompts with the run's model, as `jaxtune generate` does; each call reads the model again.

        Args:
            prompts: A list of prompts, each a text or a list of messages ({"role": ..., "content": ...}); or one text.
            step: The checkpoint; None: the newest good one, or the export if there are no checkpoints.
            mesh: Devices of each axis, such as {"fsdp": 4}; None: one device.
            **manner: Fields of `jaxtune.inference.sampling.SamplingOptions`: max_new_tokens, temperature, top_p, top_k,
                min_p, repetition_penalty, stop, seed, batch_size, chat.

        Returns:
            The answer to each prompt.
        """
        if unknown := sorted(manner.keys() - {field.name for field in dataclasses.fields(SamplingOptions)}):
            known = ", ".join(field.name for field in dataclasses.fields(SamplingOptions))
            raise UserError(f"{unknown[0]}: no such option of generate; its options are step, mesh, {known}")
        how = SamplingOptions(**manner)
        listed = [prompts] if isinstance(prompts, str) else prompts
        samples = [(f"prompts[{i}]", {"prompt": to_plain(prompt)}) for i, prompt in enumerate(listed)]
        with restore_mesh():
            devices = mesh_of([f"{axis}={size}" for axis, size in (mesh or {}).items()])
            name = str(self.folder if self._has_checkpoints or step is not None else self.model or self.folder)
            plugins = self.config.train.plugins
            answering = AnswerGenerator(open_model(name, devices, step=step, plugins=plugins), how)
            return [answer.text for answer in answering.each(samples)]

    def evaluate(
        self,
        *,
        step: int | None = None,
        tasks: Sequence[str] = (),
        num_fewshot: int | None = None,
        limit: float | None = None,
        include_path: str | Path | None = None,
        apply_chat_template: bool = False,
        **sections: Any,
    ) -> dict[str, float]:
        """Evaluate the run's model on its validation data, as `jaxtune evaluate` does, or on benchmark tasks.

        Args:
            step: The checkpoint; None: the newest good one, or the export if there are no checkpoints.
            tasks: Benchmark tasks of lm-evaluation-harness (pip install 'jaxtune[lm-eval]'), groups, tags or patterns.
            num_fewshot: Examples before each question of a task; None: the task's own number.
            limit: Maximum number of questions per task; below 1, a fraction of the task's questions.
            include_path: A folder with YAML files of further tasks.
            apply_chat_template: Whether to format the tasks' requests with the tokenizer's chat template.
            **sections: Options to change, as in `config_of`: data={"eval_datasets": [{"path": "other.jsonl"}]}.

        Returns:
            Loss, perplexity and further metrics by name, or with `tasks` the metrics named TASK/METRIC.
        """
        config = config_of(RunFolder(self.folder).config, **sections)
        how = {"num_fewshot": num_fewshot, "limit": limit, "apply_chat_template": apply_chat_template}
        how["include_path"] = None if include_path is None else str(include_path)
        if not tasks and (given := [name for name, value in how.items() if value]):
            raise UserError(f"{given[0]}: has no effect without tasks")
        exported = str(self.model) if not self._has_checkpoints and step is None and self.model is not None else None
        which = (None, None, exported) if exported else (str(self.folder), step, None)
        with restore_mesh():
            process.configure(config)
            devices = make_mesh(config.mesh, process.devices(config.device), parallel=config.parallel)
            if not tasks:
                return evaluate(config, devices, *which)
            from jaxtune.evaluation import lm_evaluation_harness as harness  # slow, and needs an optional package

            request = harness.EvalRequest((tasks,) if isinstance(tasks, str) else tuple(tasks), **how)
            return harness.metrics_of(harness.run_tasks(request, config, devices, *which)[0])

    @property
    def _has_checkpoints(self) -> bool:
        """Whether the run has checkpoints; without any, its export is its model."""
        return bool(CheckpointManager(RunFolder(self.folder).checkpoints).steps())


@contextlib.contextmanager
def restore_mesh() -> Iterator[None]:
    """Restore the caller's mesh and sharding rules, which are global, afterwards.

    Options in error messages are rewritten as arguments of a call.
    """
    mesh, rules = jax.sharding.get_mesh(), RULES.value
    try:
        yield
    except UserError as error:
        raise UserError(_OPTION.sub(_as_argument, str(error))) from error
    finally:
        jax.set_mesh(None if mesh.empty else mesh)
        RULES.set_global(rules)


def _as_argument(setting: re.Match[str]) -> str:
    """Rewrite a command-line setting as an argument of a call, or as the option's key if it has no value."""
    section, name, text = setting.groups()
    option = keys.lookup(f"{section}.{name}")
    if text is None or option is None:
        return f"{section}.{name}"
    value = from_text(text.strip("'"), option.annotation)
    return f'{section}={{"{name}": {json.dumps(value) if isinstance(value, str) else repr(value)}}}'
