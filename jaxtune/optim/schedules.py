"""Learning-rate schedules by name; values match transformers' schedulers of the same name, if there is one."""

import logging
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32

from jaxtune.errors import UserError
from jaxtune.optim.options import OptimOptions

log = logging.getLogger("jaxtune")


def warmup_steps(optim: OptimOptions, total_steps: int) -> int:
    """Return the number of warm-up steps, from the option's number or ratio.

    With a ratio, at least one step has the full rate. transformers rounds up instead, so a run of one step has a
    learning rate of 0 there.
    """
    return optim.warmup_steps or min(math.ceil(optim.warmup_ratio * total_steps), max(total_steps - 1, 0))


def check_length(optim: OptimOptions, total_steps: int) -> str | None:
    """Return a warning about a run of `total_steps` steps, or None. Raises UserError if nothing would be trained."""
    warmup, decayed = warmup_steps(optim, total_steps), optim.decay_ratio * total_steps
    if optim.decay_ratio < 1 and warmup >= decayed:
        raise UserError(
            f"optim.decay_ratio={optim.decay_ratio} of {total_steps} steps is over before warm-up is, after {warmup} "
            "steps: nothing would be trained; shorten optim.warmup_steps, or train longer"
        )
    if warmup and total_steps == 1 and optim.start_lr == 0:
        return (
            "the only step is warm-up with a learning rate of 0, so nothing is trained; set optim.warmup_steps=0, or "
            "train longer"
        )
    if warmup >= total_steps:
        return (
            f"all {total_steps} steps are warm-up, so the learning rate never reaches optim.learning_rate; shorten "
            "optim.warmup_steps or optim.warmup_ratio, or train longer"
        )
    if warmup + optim.cooldown_steps > total_steps:
        return f"optim.warmup_steps and optim.cooldown_steps are more than the {total_steps} steps of the run"
    return None


def learning_rate(optim: OptimOptions, total_steps: int) -> Callable[[Array], Array]:
    """Return a function: step (0 is the first) -> learning rate in float32.

    Linear warm-up from start_lr to the peak, then the shape that optim.schedule names, down to the final rate. The
    decaying shapes reach it after decay_ratio of all steps and stay there (a cosine of whole waves ends at the peak
    instead, as in transformers); wsd and constant stay at the peak; inverse_sqrt never falls below the final rate. Over
    the last cooldown_steps, every shape falls linearly from its rate at that point to the final rate.
    """
    peak, warmup = optim.learning_rate, warmup_steps(optim, total_steps)
    final = optim.final_lr_fraction if optim.min_lr is None else optim.min_lr / peak
    decay_steps = max(1, round(optim.decay_ratio * total_steps) - warmup)
    cooldown_start = max(warmup, total_steps - optim.cooldown_steps)

    def towards_final(fraction):
        return final + (1.0 - final) * fraction

    def shape(step):
        decayed = jnp.clip(step - warmup, 0, decay_steps)  # in steps, so that a restart is exactly at a step
        progress = decayed / decay_steps
        match optim.schedule:
            case "linear":
                return towards_final(1.0 - progress)
            case "cosine":
                waves = 0.5 if optim.cycles is None else optim.cycles  # num_cycles of transformers
                return towards_final(0.5 * (1.0 + jnp.cos(2.0 * jnp.pi * waves * progress)))
            case "cosine_with_restarts":
                restarts = 1.0 if optim.cycles is None else optim.cycles  # num_cycles of transformers
                # The last step is the end of the last wave, not the start of another.
                phase = jnp.where(progress >= 1.0, 1.0, (restarts * decayed) % decay_steps / decay_steps)
                return towards_final(0.5 * (1.0 + jnp.cos(jnp.pi * phase)))
            case "polynomial":
                return towards_final((1.0 - progress) ** optim.power)
            case "inverse_sqrt":
                timescale = max(1, warmup or 10_000)  # transformers' default without warm-up
                return jnp.maximum(final, jnp.sqrt(timescale / jnp.maximum(step - warmup + timescale, 1)))
            case "constant" | "wsd":
                return jnp.ones_like(progress)
        raise AssertionError(f"schema allows a schedule that is not here: {optim.schedule}")

    def rate(step):
        step = jnp.asarray(step, jnp.float32)
        warm = optim.start_lr + (peak - optim.start_lr) * (step / max(1, warmup))
        if optim.cooldown_steps:
            left = jnp.clip((total_steps - step) / optim.cooldown_steps, 0.0, 1.0)
            factor = final + (shape(jnp.minimum(step, cooldown_start)) - final) * left
        else:
            factor = shape(step)
        return jnp.where(step < warmup, warm, peak * factor)

    return rate


def learning_rates(optim: OptimOptions, total_steps: int) -> Float32[np.ndarray, " steps"]:
    """Return the learning rate of every step of a run.

    The rate is an argument of the compiled step, so a run of another length uses the same program. Logs a warning if
    the schedule does not fit the number of steps. Raises UserError if nothing would be trained.
    """
    if note := check_length(optim, total_steps):
        log.warning(note)
    rate = learning_rate(optim, total_steps)
    # lax.map, step by step: in a vectorised computation the last bit of a cosine may differ.
    return np.asarray(jax.jit(lambda: jax.lax.map(rate, jnp.arange(total_steps)))())
