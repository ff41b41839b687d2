"""Learning-rate schedules by name; values match transformers' schedulers of the same names where it has them."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax.numpy as jnp
from jaxtyping import Array

if TYPE_CHECKING:
    from jaxtune.config.schema import Optim


def warmup_steps(optim: "Optim", total_steps: int) -> int:
    """Steps of warm-up, from the number or the ratio."""
    return optim.warmup_steps or math.ceil(optim.warmup_ratio * total_steps)


def learning_rate(optim: "Optim", total_steps: int) -> Callable[[Array], Array]:
    """step (0 is the first) -> learning rate in float32: linear warm-up, the shape, then the final fraction."""
    warmup, final = warmup_steps(optim, total_steps), optim.final_lr_fraction
    decay_steps = max(1, total_steps - warmup)

    def towards_final(fraction):
        return final + (1.0 - final) * fraction

    def shape(step):
        progress = jnp.clip((step - warmup) / decay_steps, 0.0, 1.0)
        match optim.schedule:
            case "linear":
                return towards_final(1.0 - progress)
            case "cosine":
                return towards_final(0.5 * (1.0 + jnp.cos(jnp.pi * progress)))
            case "cosine_with_restarts":
                phase = jnp.where(progress >= 1.0, 1.0, (optim.cycles * progress) % 1.0)
                return towards_final(0.5 * (1.0 + jnp.cos(jnp.pi * phase)))
            case "polynomial":
                return towards_final((1.0 - progress) ** optim.power)
            case "inverse_sqrt":
                timescale = max(1, warmup or 10_000)
                return jnp.maximum(final, jnp.sqrt(timescale / jnp.maximum(step - warmup + timescale, 1)))
            case "constant" | "wsd":
                left = (total_steps - step) / max(1, optim.cooldown_steps)
                return towards_final(jnp.clip(left, 0.0, 1.0)) if optim.cooldown_steps else jnp.ones_like(progress)
        raise AssertionError(f"schema allows a schedule that is not here: {optim.schedule}")

    def rate(step):
        step = jnp.asarray(step, jnp.float32)
        warm = step / max(1, warmup)
        return optim.learning_rate * jnp.where(step < warmup, warm, shape(step))

    return rate
