"""Loss spikes: steps whose loss, or gradient norm, is far above that of the steps before them, are not taken."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxtune.config.schema import Guard


class Level(NamedTuple):
    """What losses and gradient norms have been, averaged over guard.window steps; float32.

    Attributes:
        loss, variance: mean of the losses, and of their squared distance from it.
        norm: mean of the gradient norms.
        steps: that were counted.
        rate: what the learning rate is multiplied by.
    """

    loss: Float[Array, ""]
    variance: Float[Array, ""]
    norm: Float[Array, ""]
    steps: Int[Array, ""]
    rate: Float[Array, ""]


def first_level() -> Level:
    """Before the first step."""
    zero = jnp.zeros((), jnp.float32)
    return Level(zero, zero, zero, jnp.zeros((), jnp.int32), jnp.ones((), jnp.float32))


def is_spike(level: Level, loss: Float[Array, ""], norm: Float[Array, ""], options: Guard) -> Bool[Array, ""]:
    """Whether a step is out of line; none is before guard.window steps were counted, and what is not finite is none."""
    far = loss > level.loss + options.deviations * jnp.sqrt(level.variance)
    return (level.steps >= options.window) & (far | (norm > options.norm_factor * level.norm))


def level_after(
    level: Level,
    loss: Float[Array, ""],
    norm: Float[Array, ""],
    taken: Bool[Array, ""],
    spike: Bool[Array, ""],
    options: Guard,
) -> Level:
    """The level after a step, which counts if it was taken.

    Means of all steps at first, then exponential ones (West 1979, of the variance). The rate halves at a spike, if
    guard.action is lower_rate, and is back guard.window steps later.
    """
    weight = jnp.maximum(1 / (level.steps + 1), 1 / options.window)
    apart = loss - level.loss
    counted = Level(
        level.loss + weight * apart,
        (1 - weight) * (level.variance + weight * apart**2),
        level.norm + weight * (norm - level.norm),
        level.steps + 1,
        jnp.minimum(level.rate * 2 ** (1 / options.window), 1.0),
    )
    lowered = level._replace(rate=level.rate * jnp.where(spike & (options.action == "lower_rate"), 0.5, 1.0))
    return Level(*(jnp.where(taken, new, old) for new, old in zip(counted, lowered)))
