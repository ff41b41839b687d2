"""The folder of a run: where its files are, and the model it holds."""

import dataclasses
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxtune.checkpoint import CheckpointManager, verify_fingerprint
from jaxtune.config import from_json, to_json
from jaxtune.config.schema import Config
from jaxtune.data import Counts
from jaxtune.errors import UserError
from jaxtune.models.decoder import Parameters
from jaxtune.optim.adamw_8bit import undivided_moments
from jaxtune.optim.build import Optimizer, build
from jaxtune.parallel import multihost
from jaxtune.parallel.layout import P
from jaxtune.state import Model, declare_model, frozen_parameters, recipe_of_run, trained_of
from jaxtune.step import State, initial_state

# Options that may differ when a run goes on: they change where and how, never what is computed.
MAY_CHANGE = (
    "ckpt", "eval", "export", "log", "memory", "mesh", "prof", "data.cache_dir",
    "train.output_dir", "train.run_name", "train.max_bad_steps", "train.max_steps", "train.epochs",
    "train.micro_batch_size", "train.grad_accum_steps",
)  # fmt: skip


@dataclass(frozen=True)
class RunFolder:
    """<train.output_dir>/<train.run_name>."""

    path: Path

    @property
    def config(self) -> Path:
        """The resolved config, as JSON."""
        return self.path / "config.json"

    @property
    def checkpoints(self) -> Path:
        """One folder a step."""
        return self.path / "checkpoints"

    @property
    def metrics(self) -> Path:
        """One JSON object a step."""
        return self.path / "metrics.jsonl"

    @property
    def loss_curve(self) -> Path:
        """A picture of the metrics."""
        return self.path / "loss.png"

    @property
    def export(self) -> Path:
        """What the run made: a Hugging Face folder, or a PEFT adapter."""
        return self.path / "export"

    def write_records(self, config: Config, counts: Counts) -> None:
        """Record the config and what became of the documents (data.json), by the main process."""
        if multihost.is_main():
            self.path.mkdir(parents=True, exist_ok=True)
            self.config.write_text(to_json(config))
            (self.path / "data.json").write_text(json.dumps(dataclasses.asdict(counts), indent=1) + "\n")

    def read_config(self) -> Config:
        """The recorded config. Raises UserError if this is no run folder."""
        if not self.config.is_file():
            raise UserError(f"{self.path} is no run folder: it has no config.json")
        return from_json(self.config.read_text())


def run_folder(config: Config) -> RunFolder:
    """The folder of this config's run."""
    return RunFolder(Path(config.train.output_dir) / (config.train.run_name or "run"))


def optimizer_of(model: Model, config: Config) -> Optimizer:
    """The optimizer of what is trained. Raises UserError where the mesh would split a block of its state."""
    if config.optim.name == "adamw_8bit":
        trained = {name: model.parameters[name] for name in model.trained}
        if complaints := undivided_moments(trained, jax.sharding.get_mesh()):
            raise UserError("\n  ".join(["the mesh does not divide the optimizer's state:", *complaints]))
    # Muon's own code multiplies in bfloat16; float16 would lose gradients before they are divided by their norm.
    dtype = jnp.float32 if config.precision.recipe == "fp32" else jnp.bfloat16
    return build(config.optim, trained_of(model), len(model.spec.layers), dtype)


def start_of(model: Model, config: Config, optimizer: Optimizer) -> Callable[[Parameters], State]:
    """Trained parameters -> the state before the first step."""
    recipe = recipe_of_run(config, model)
    return lambda trained: initial_state(optimizer, trained, recipe)


def abstract_state(model: Model, config: Config, optimizer: Optimizer, mesh: jax.sharding.Mesh) -> State:
    """Shapes, dtypes and shardings of the whole state."""
    state = jax.eval_shape(start_of(model, config, optimizer), model.abstract(model.trained))

    def on_mesh(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        spec = P() if leaf.sharding is None else leaf.sharding.spec  # the optimizer's counters are whole everywhere
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=jax.NamedSharding(mesh, spec))

    return jax.tree.map(on_mesh, state)


def check_unchanged(saved: dict[str, Any], config: Config) -> None:
    """Raise UserError naming each option that a run may not change when it goes on."""
    now = json.loads(to_json(config))
    changed = [f"  {key}: {before!r} then, {after!r} now" for key, before, after in differences(saved, now, "")]
    if changed:
        raise UserError(
            "this run was started with other options, so it cannot go on:\n"
            + "\n".join(changed)
            + "\nset them back, or start a new run with --config.train.run_name=NAME"
        )


def differences(before: Any, after: Any, key: str) -> Iterator[tuple[str, Any, Any]]:
    """(key, before, after) of each option below a key that a run may not change and that differs."""
    if key in MAY_CHANGE or before == after:
        return
    if isinstance(before, dict) and isinstance(after, dict):
        for name in sorted(before.keys() | after.keys()):
            yield from differences(before.get(name), after.get(name), f"{key}.{name}" if key else name)
    else:
        yield key, before, after


@dataclass(frozen=True)
class TrainedModel:
    """A model as a checkpoint holds it, on a mesh."""

    config: Config
    model: Model
    trained: Parameters
    frozen: Parameters
    step: int
    tokens: int


def open_run(folder: RunFolder, mesh: jax.sharding.Mesh, step: int | None, low_precision: bool = False) -> TrainedModel:
    """The model of a run at a step, or at its newest good checkpoint; `low_precision` to compute as it was trained."""
    config = folder.read_config()
    model = declare_model(config, mesh, low_precision=low_precision)
    wanted = {"trained": model.abstract(model.trained)}  # without the optimizer's state, which is larger
    restored = CheckpointManager(folder.checkpoints).restore(wanted, step, part=True)
    if restored is None:
        raise UserError(f"{folder.path} has no checkpoint yet")
    if not config.model.from_scratch:
        verify_fingerprint(model.folder, restored.host["base"])
    return TrainedModel(
        config,
        model,
        restored.state["trained"],
        frozen_parameters(model, config),
        restored.step,
        restored.host["tokens"],
    )
