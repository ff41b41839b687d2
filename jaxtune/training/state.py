"""The state of a run: what a step changes."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxtune.models.decoder import Parameters
from jaxtune.optim.build import Optimizer, OptimizerState
from jaxtune.precision import loss_scale
from jaxtune.precision.linears import Amax
from jaxtune.precision.loss_scale import LossScale
from jaxtune.precision.recipes import Recipe
from jaxtune.training.guard import Level


class Scaling(NamedTuple):
    """What a precision recipe carries from step to step."""

    loss: LossScale | None = None
    amax: Amax = {}  # noqa: RUF012


class State(NamedTuple):
    """What a step changes. Frozen parameters stand beside it.

    reference: earlier values of the trained parameters, where an objective compares with them (`weights.reference`).
    average: of the trained parameters over steps, float32, where optim.ema_decay asks for it.
    base: weights into which adapters are merged while they are trained (`weights.relora`); in a checkpoint also what
        frozen parts of adapters began as, which no file holds (`Model.starts`).
    guard: what losses have been, where spikes are looked for (`training.guard`).
    """

    step: Int[Array, ""]
    trained: Parameters
    optimizer: OptimizerState
    scaling: Scaling = Scaling()
    reference: Parameters = {}  # noqa: RUF012
    average: Parameters = {}  # noqa: RUF012
    base: Parameters = {}  # noqa: RUF012
    guard: Level | None = None

    @property
    def result(self) -> Parameters:
        """What training has changed, as it is evaluated and exported."""
        return {**self.base, **(self.average or self.trained)}


def initial_state(optimizer: Optimizer, trained: Parameters, recipe: Recipe | None = None) -> State:
    """The state before the first step."""
    scaling = Scaling()
    if recipe is not None and recipe.loss_scale is not None:
        scaling = scaling._replace(loss=loss_scale.initial(recipe.loss_scale))
    if recipe is not None and recipe.linears is not None:
        scaling = scaling._replace(amax=recipe.linears.initial_amax())
    return State(jnp.zeros((), jnp.int32), trained, optimizer.init(trained), scaling)
