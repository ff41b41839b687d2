"""The model that a run has trained, as one of its checkpoints holds it."""

from dataclasses import dataclass

import jax

from jaxtune.checkpoint import CheckpointManager, verify_fingerprint
from jaxtune.config.schema import Config
from jaxtune.errors import UserError
from jaxtune.models.decoder import Parameters
from jaxtune.run.folder import RunFolder
from jaxtune.run.model import Model, declare_model
from jaxtune.run.values import frozen_parameters


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
