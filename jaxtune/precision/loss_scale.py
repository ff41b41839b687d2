"""Dynamic loss scaling for float16 gradients (Micikevicius et al. 2017, arXiv:1710.03740), as torch's GradScaler."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

LEAST = 1.0  # a gradient that overflows without a scale will not be saved by a smaller one


class LossScale(NamedTuple):
    """The scale, and what decides about the next one."""

    scale: Float[Array, ""]
    good_steps: Int[Array, ""]  # since it changed
    skipped_steps: Int[Array, ""]  # of the whole run


def initial(scale: float) -> LossScale:
    """Before the first step."""
    return LossScale(jnp.float32(scale), jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32))


def updated(state: LossScale, finite: Bool[Array, ""], growth_steps: int) -> LossScale:
    """Halved after a step that overflowed, doubled after `growth_steps` steps that did not."""
    good = jnp.where(finite, state.good_steps + 1, 0)
    grows = good >= growth_steps
    scale = jnp.where(finite, jnp.where(grows, 2.0, 1.0), 0.5) * state.scale
    return LossScale(jnp.maximum(scale, LEAST), jnp.where(grows, 0, good), state.skipped_steps + ~finite)
