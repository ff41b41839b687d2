"""What an optimizer is here: a rule for one parameter."""

from collections.abc import Callable
from typing import Any, NamedTuple

from jaxtyping import Array, Float, Int

# Arrays with the leading axis of a stacked parameter, sharded as it is; or scalars.
RuleState = Any


class At(NamedTuple):
    """Where an update stands.

    multiplier and decay are numbers, or arrays (layers, 1, ...) where the layers of a stacked parameter differ.
    """

    count: Int[Array, ""]  # updates before this one; steps that were not finite do not count
    rate: Float[Array, ""]  # learning rate of the step
    multiplier: Any  # of the learning rate, for this parameter
    decay: Any  # weight decay of this parameter


def _itself(parameter: Array, state: RuleState) -> Array:
    return parameter


class Rule(NamedTuple):
    """How one parameter, a matrix, a vector or a stack of them, becomes the next.

    Parameters, gradients and the floating arrays of the state are float32 here, whatever they are stored in: rounding
    them, stochastically where it is to bfloat16, and keeping the old ones after a step that was not finite is the
    business of `build`.
    """

    init: Callable[[Float[Array, "..."]], RuleState]
    update: Callable[[Float[Array, "..."], RuleState, Float[Array, "..."], At], tuple[Float[Array, "..."], RuleState]]
    """(gradient, state, parameter, at) -> (parameter, state)."""
    point: Callable[[Float[Array, "..."], RuleState], Float[Array, "..."]] = _itself
    """(parameter, state) -> where the gradient is to be taken."""
    by_layer: bool = False
    """Called for one layer of a stacked parameter after the other, so that what it computes with is of one layer."""


def descend(parameter: Float[Array, "..."], direction: Float[Array, "..."], at: At) -> Float[Array, "..."]:
    """A step along a direction, with decoupled weight decay (Loshchilov & Hutter 2019)."""
    return parameter - at.rate * at.multiplier * (direction + at.decay * parameter)
