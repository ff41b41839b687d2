"""Guard against loss spikes: skip steps whose loss or gradient norm is far above the recent mean."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxtune.config.schema import GuardOptions


class Level(NamedTuple):
    """Running means of loss and gradient norm over guard.window steps, in float32.

    Attributes:
        loss: Mean of the losses.
        variance: Mean of their squared distance from the mean.
        norm: Mean of the gradient norms.
        steps: Number of counted steps.
        rate: Factor of the learning rate.
    """

    loss: Float[Array, ""]
    variance: Float[Array, ""]
    norm: Float[Array, ""]
    steps: Int[Array, ""]
    rate: Float[Array, ""]


def first_level() -> Level:
    """Return the level before the first step."""
    zero = jnp.zeros((), jnp.float32)
    return Level(zero, zero, zero, jnp.zeros((), jnp.int32), jnp.ones((), jnp.float32))


def bounds(level: Level, options: GuardOptions) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Return the largest loss and gradient norm that are not a spike; infinite in the first guard.window steps."""
    ready = level.steps >= options.window
    loss = level.loss + options.deviations * jnp.sqrt(level.variance)
    # A mean norm of 0 gives no bound, because any step would exceed it.
    norm = options.norm_factor * level.norm
    return jnp.where(ready, loss, jnp.inf), jnp.where(ready & (norm > 0), norm, jnp.inf)


def level_after(
    level: Level, loss: Float[Array, ""], norm: Float[Array, ""], finite: Bool[Array, ""], options: GuardOptions
) -> Level:
    """Return the level after a step; a step that is not finite does not count.

    The means are over all steps at first, then exponential moving averages (West 1979 for the variance). A spike counts
    as the bound that it exceeds, so that the level rises if losses stay high. If guard.action is lower_rate, a spike
    halves the rate, which recovers within guard.window steps.
    """
    most = bounds(level, options)
    spike = finite & ((loss > most[0]) | (norm > most[1]))
    loss, norm = jnp.minimum(loss, most[0]), jnp.minimum(norm, most[1])
    # 1 / steps is the plain mean, up to guard.window steps; then the weight of an exponential average.
    weight = jnp.maximum(1 / (level.steps + 1), 1 / options.window)
    deviation = loss - level.loss
    counted = Level(
        level.loss + weight * deviation,
        (1 - weight) * (level.variance + weight * deviation**2),
        level.norm + weight * (norm - level.norm),
        level.steps + 1,
        jnp.where(
            spike & (options.action == "lower_rate"),
            level.rate / 2,
            jnp.minimum(level.rate * 2 ** (1 / options.window), 1.0),  # doubles over guard.window steps
        ),
    )
    return Level(*(jnp.where(finite, new, old) for new, old in zip(counted, level)))
