"""Dynamic loss scaling for float16 gradients (Micikevicius et al. 2017, arXiv:1710.03740), like torch's GradScaler."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

LEAST = 1.0  # a gradient that overflows at scale 1 is broken: a smaller scale would not save it


class LossScale(NamedTuple):
    """State of dynamic loss scaling.

    Attributes:
        scale: multiplies the loss before the backward pass.
        good_steps: steps without an overflow since the scale last changed.
        skipped_steps: steps of the whole run that were skipped because they overflowed.
    """

    scale: Float[Array, ""]
    good_steps: Int[Array, ""]
    skipped_steps: Int[Array, ""]


def initial(scale: float) -> LossScale:
    """Return the state before the first step."""
    return LossScale(jnp.float32(scale), jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32))


def update_scale(state: LossScale, finite: Bool[Array, ""], growth_steps: int) -> LossScale:
    """Halve the scale after a step that overflowed; double it after `growth_steps` steps that did not."""
    good = jnp.where(finite, state.good_steps + 1, 0)
    grows = good >= growth_steps
    scale = jnp.where(finite, jnp.where(grows, 2.0, 1.0), 0.5) * state.scale
    return LossScale(jnp.maximum(scale, LEAST), jnp.where(grows, 0, good), state.skipped_steps + ~finite)
