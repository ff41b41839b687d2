"""jaxtune from Python, as in a notebook: the config of a run, and the run that `jaxtune.train` makes of it.

    import jaxtune

    run = jaxtune.train("qwen_lora:my/model", optim={"learning_rate": 1e-4})
    run.last["loss"], run.model, run.generate(["Once"]), run.evaluate()

What a command would print as an error is raised as `jaxtune.UserError`.
"""

import contextlib
import dataclasses
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict

from jaxtune.checkpoint import CheckpointManager
from jaxtune.config import keys
from jaxtune.config.loading import as_dict, from_text, plain
from jaxtune.config.recipe import Recipe, read_recipe
from jaxtune.config.schema import Config
from jaxtune.errors import UserError
from jaxtune.evaluation.validation import evaluate
from jaxtune.host import process
from jaxtune.host.run_folder import RunFolder
from jaxtune.inference.answers import Answering, mesh_of, open_model
from jaxtune.inference.sampling import Manner
from jaxtune.monitor import metrics
from jaxtune.monitor.series import Series, series
from jaxtune.parallel.layout import RULES
from jaxtune.parallel.mesh import make_mesh
from jaxtune.weights.architecture import count_parameters

_OPTION = re.compile(r"--config\.(\w+)\.(\w+(?:\.\w+)*)(?:=('[^']*'|[\w./-]*\w))?")  # as a command takes it


def config_of(recipe: str | Path | Config | ConfigDict, *, dialect: str | None = None, **sections: Any) -> Config:
    """The checked config of a recipe, of which some options are changed: `config_of("qwen_lora", lora={"rank": 64})`.

    Args:
        recipe: As --config takes it: NAME or FILE, either with :ARGUMENT; or a config, to change or to check.
        dialect: The system that a YAML file was written for; None: its keys tell.
        **sections: Options by their section, as dicts; they count as typed on the command line.

    Raises:
        UserError: No such recipe, unknown options, wrong types, contradictions, or one given here without effect.
    """
    settings = dict(keys.leaves(plain(sections)))
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
    found = Recipe("config", written, notes=recipe.notes).resolve(settings.items(), by="call", count=count_parameters)
    left_out = [said for said in recipe.said if said.moot]
    return dataclasses.replace(found, said=(*left_out, *found.said)) if settings else recipe


@dataclass(frozen=True)
class Run:
    """What `jaxtune.train` has made. The Python files that its config names are run, as they were to train it.

    Attributes:
        folder: Where it is.
        finished: Whether it is at its end; a run that was asked to stop is not, and goes on if it is trained again.
    """

    folder: Path
    finished: bool

    @property
    def config(self) -> Config:
        """All of its options."""
        return RunFolder(self.folder).read_config()

    @property
    def metrics(self) -> dict[str, Series]:
        """Each metric by its name: `values`, and where these stand: `at["step"]`, and at["tokens"], at["hours"].

        Raises UserError where log.jsonl is off.
        """
        file = RunFolder(self.folder).metrics
        if not file.is_file():
            raise UserError(f"{self.folder} has no {file.name}: log.jsonl is off")
        return series(metrics.read(file))

    @property
    def last(self) -> dict[str, float]:
        """The last value of each metric."""
        return {name: float(found.values[-1]) for name, found in self.metrics.items()}

    @property
    def model(self) -> Path | None:
        """The Hugging Face folder or adapter that it exported; None if there is none."""
        folder = RunFolder(self.folder)
        return folder.export if folder.exported else None

    def generate(
        self,
        prompts: str | Sequence[str | Sequence[Mapping[str, Any]]],
        *,
        step: int | None = None,
        mesh: Mapping[str, int] | None = None,
        **manner: Any,
    ) -> list[str]:
        """Continues each prompt with its model, as `jaxtune generate` does; each call reads it again.

        Args:
            prompts: Each a text, or a list of messages ({"role": ..., "content": ...}); one text is a single prompt.
            step: The checkpoint; None: the newest good one, or what was exported where there is none.
            mesh: Devices of each axis, such as {"fsdp": 4}; None: one device.
            **manner: Of `jaxtune.inference.sampling.Manner`: max_new_tokens, temperature, top_p, top_k, min_p,
                repetition_penalty, stop, seed, batch_size, chat.
        """
        if unknown := sorted(manner.keys() - {field.name for field in dataclasses.fields(Manner)}):
            known = ", ".join(field.name for field in dataclasses.fields(Manner))
            raise UserError(f"{unknown[0]}: no such option of generate; these are: step, mesh, {known}")
        how = Manner(**manner)
        listed = [prompts] if isinstance(prompts, str) else prompts
        samples = [(f"prompts[{i}]", {"prompt": plain(prompt)}) for i, prompt in enumerate(listed)]
        with mesh_put_back():
            devices = mesh_of([f"{axis}={size}" for axis, size in (mesh or {}).items()])
            name = str(self.folder if self._saved or step is not None else self.model or self.folder)
            own = self.config.train.plugins
            answering = Answering(open_model(name, devices, step=step, plugins=own), how)
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
        """Loss, perplexity and more on its validation data, as `jaxtune evaluate` does; or TASK/METRIC of `tasks`.

        Args:
            step: The checkpoint; None: the newest good one, or what was exported where there is none.
            tasks: Benchmark tasks of lm-evaluation-harness (pip install 'jaxtune[lm-eval]'), groups, tags or patterns.
            num_fewshot: Examples before each question of theirs; None: as the task says.
            limit: Only so many questions of each, or below 1 that share of them.
            include_path: A folder with YAML files of further tasks.
            apply_chat_template: Whether they are asked by the tokenizer's chat template.
            **sections: Options to change, as in `config_of`: data={"eval_datasets": [{"path": "other.jsonl"}]}.
        """
        config = config_of(RunFolder(self.folder).config, **sections)
        how = {"num_fewshot": num_fewshot, "limit": limit, "apply_chat_template": apply_chat_template}
        how["include_path"] = None if include_path is None else str(include_path)
        if not tasks and (given := [name for name, value in how.items() if value]):
            raise UserError(f"{given[0]}: has no effect without tasks")
        exported = str(self.model) if not self._saved and step is None and self.model is not None else None
        which = (None, None, exported) if exported else (str(self.folder), step, None)
        with mesh_put_back():
            process.configure(config)
            devices = make_mesh(config.mesh, process.devices(config.device), parallel=config.parallel)
            if not tasks:
                return evaluate(config, devices, *which)
            from jaxtune.evaluation import lm_evaluation_harness as harness  # seconds to import, of an optional package

            asked = harness.Asked((tasks,) if isinstance(tasks, str) else tuple(tasks), **how)
            return harness.metrics_of(harness.run_tasks(asked, config, devices, *which)[0])

    @property
    def _saved(self) -> bool:
        """Whether there are checkpoints; without any, what was exported is the model."""
        return bool(CheckpointManager(RunFolder(self.folder).checkpoints).steps())


@contextlib.contextmanager
def mesh_put_back() -> Iterator[None]:
    """The current mesh, and the rules that come with it, are global: afterwards they are the caller's again.

    Options in errors are written as arguments of a call.
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
    """A setting of the command line as an argument of a call; an option without a value as its key."""
    section, name, text = setting.groups()
    option = keys.lookup(f"{section}.{name}")
    if text is None or option is None:
        return f"{section}.{name}"
    value = from_text(text.strip("'"), option.annotation)
    return f'{section}={{"{name}": {json.dumps(value) if isinstance(value, str) else repr(value)}}}'
