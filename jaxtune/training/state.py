"""The training state: everything that a step changes."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxtune.models.decoder import Parameters
from jaxtune.optim.build import Optimizer, OptimizerState
from jaxtune.precision import loss_scale
from jaxtune.precision.linears import Amax
from jaxtune.precision.loss_scale import LossScale
from jaxtune.precision.recipes import PrecisionRecipe
from jaxtune.training.guard import Level


class Scaling(NamedTuple):
    """The state of a precision recipe: loss scale and amax history."""

    loss: LossScale | None = None
    amax: Amax = {}  # noqa: RUF012


class State(NamedTuple):
    """Everything that a step changes. Frozen parameters are separate arguments of a step.

    Attributes:
        step: number of steps taken.
        trained: the trained parameters.
        optimizer: the optimizer's state.
        scaling: the state of the precision recipe.
        reference: earlier values of the trained parameters, if the objective compares with them (`weights.reference`).
        average: moving average of the trained parameters, float32, if optim.ema_decay is set.
        base: weights into which adapters are merged during training (`weights.relora`). In a checkpoint also the
            initial values of frozen adapter parts, which no file holds (`Model.starts`).
        guard: statistics of past losses, for spike detection (`training.guard`).
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
        """The weights that training has changed, as they are evaluated and exported."""
        return {**self.base, **(self.average or self.trained)}


def initial_state(optimizer: Optimizer, trained: Parameters, recipe: PrecisionRecipe | None = None) -> State:
    """The state before the first step."""
    scaling = Scaling()
    if recipe is not None and recipe.loss_scale is not None:
        scaling = scaling._replace(loss=loss_scale.initial(recipe.loss_scale))
    if recipe is not None and recipe.linears is not None:
        scaling = scaling._replace(amax=recipe.linears.initial_amax())
    return State(jnp.zeros((), jnp.int32), trained, optimizer.init(trained), scaling)
