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


def bounds(level: Level, options: Guard) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """The largest loss and gradient norm that are no spike; infinite before guard.window steps were counted."""
    ready = level.steps >= options.window
    loss = level.loss + options.deviations * jnp.sqrt(level.variance)
    norm = options.norm_factor * level.norm
    return jnp.where(ready, loss, jnp.inf), jnp.where(ready & (norm > 0), norm, jnp.inf)


def level_after(
    level: Level, loss: Float[Array, ""], norm: Float[Array, ""], finite: Bool[Array, ""], options: Guard
) -> Level:
    """The level after a step; one that is not finite does not count.

    Means of all steps at first, then exponential ones (West 1979, of the variance). A spike counts as the bound that
    it is above, so that the level follows where losses stay. The rate halves at one, if guard.action is lower_rate, and
    is back guard.window steps later.
    """
    most = bounds(level, options)
    spike = finite & ((loss > most[0]) | (norm > most[1]))
    loss, norm = jnp.minimum(loss, most[0]), jnp.minimum(norm, most[1])
    weight = jnp.maximum(1 / (level.steps + 1), 1 / options.window)
    apart = loss - level.loss
    counted = Level(
        level.loss + weight * apart,
        (1 - weight) * (level.variance + weight * apart**2),
        level.norm + weight * (norm - level.norm),
        level.steps + 1,
        jnp.where(
            spike & (options.action == "lower_rate"),
            level.rate / 2,
            jnp.minimum(level.rate * 2 ** (1 / options.window), 1.0),
        ),
    )
    return Level(*(jnp.where(finite, new, old) for new, old in zip(counted, level)))
