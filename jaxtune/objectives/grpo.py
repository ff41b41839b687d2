"""Learning from rewards: GRPO (Shao et al. 2024, arXiv:2402.03300), Dr. GRPO, DAPO and GSPO, as in TRL.

A row is one prompt and its completion; only the completion's tokens have a loss weight.

Shape letters: n completions of a group or of a step, g groups.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float64

from jaxtune.columns import ADVANTAGE, NEXT_TOKEN, OLD_LOG_PROB
from jaxtune.models.score import Batch, ScoreOptions, Scores
from jaxtune.objectives.objective import Objective, Sums
from jaxtune.objectives.options import GrpoOptions

EPSILON = 1e-4  # added to a standard deviation, as in TRL


def grpo(options: GrpoOptions, max_new_tokens: int, temperature: float = 1.0) -> Objective:
    """Return the objective for rows with advantages.

    max_new_tokens: the divisor of Dr. GRPO. temperature: the sampling temperature of the completions, which divides the
    logits here too. With more than one iteration, rows also have the log-probabilities from before the first iteration;
    otherwise the ratio is 1, but its gradient is not 0. Metrics: clip_ratio/low and clip_ratio/high, the shares of
    tokens (GSPO: of completions) with a clipped ratio; and kl, if beta is above 0.
    """
    columns = (*NEXT_TOKEN, ADVANTAGE, *([OLD_LOG_PROB] if options.iterations > 1 else []))
    counts = "target_tokens" if options.loss == "dapo" else "completions"
    sums, compares = partial(_sums, options, max_new_tokens), options.beta > 0
    return Objective(sums, columns, compares, ScoreOptions(temperature=temperature), counts=counts)


def _sums(options: GrpoOptions, max_new_tokens: int, scores: Scores, batch: Batch) -> Sums:
    mask = (batch["loss_weight"] > 0).astype(jnp.float32)
    tokens = jnp.maximum(jnp.sum(mask, -1, keepdims=True), 1)
    # Without stored log-probabilities the current ones are the old ones: the ratio is 1 and only has a gradient.
    old = batch.get(OLD_LOG_PROB.name, jax.lax.stop_gradient(scores.log_prob))
    log_ratio, advantage = (scores.log_prob - old) * mask, batch[ADVANTAGE.name]
    counted = mask
    if options.importance == "sequence":  # one ratio for each completion, at all of its tokens (GSPO)
        log_ratio = jnp.broadcast_to(jnp.sum(log_ratio, -1, keepdims=True) / tokens, mask.shape)
        counted = mask / tokens
    ratio = jnp.exp(log_ratio)
    low, high = 1 - options.clip_low, 1 + (options.clip_low if options.clip_high is None else options.clip_high)
    losses = -jnp.minimum(ratio * advantage, jnp.clip(ratio, low, high) * advantage)
    clipped = {
        "clip_ratio/low": (ratio < low) & (advantage < 0),
        "clip_ratio/high": (ratio > high) & (advantage > 0),
    }
    metrics = {name: (jnp.sum(where * counted), jnp.sum(counted)) for name, where in clipped.items()}
    if options.beta:
        assert scores.reference is not None
        further = (scores.reference - scores.log_prob) * mask
        kl = jnp.expm1(further) - further  # the k3 estimator (Schulman 2020), never negative
        losses += options.beta * kl
        metrics["kl"] = jnp.sum(kl * mask), jnp.sum(mask)
    completions = jnp.sum(jnp.max(batch["segment_ids"], -1), dtype=jnp.int32)
    if options.loss == "dapo":
        return Sums(jnp.sum(losses * mask), jnp.sum(mask, dtype=jnp.int32), metrics)
    # GRPO divides by each completion's length; Dr. GRPO by a constant, which removes the bias by length.
    length = tokens if options.loss == "grpo" else max_new_tokens
    return Sums(jnp.sum(losses * mask / length), completions, metrics)


def advantages(rewards: Float64[np.ndarray, " n"], group_size: int, scale: str) -> Float64[np.ndarray, " n"]:
    """Return the difference of each reward from the mean of its group of `group_size` consecutive rewards, scaled.

    scale: grpo.advantage_scale. A reward of NaN is missing: it is left out of means, and its advantage is 0.
    """
    groups, known = rewards.reshape(-1, group_size), ~np.isnan(rewards)
    above = (groups - _mean(groups)).reshape(-1)
    if scale != "none":
        among = groups if scale == "group" else rewards[None]
        above /= np.broadcast_to(_deviation(among), groups.shape).reshape(-1) + EPSILON
    return np.where(known, above, 0)


def _mean(groups: Float64[np.ndarray, "g n"]) -> Float64[np.ndarray, "g 1"]:
    count = np.maximum(np.sum(~np.isnan(groups), -1, keepdims=True), 1)
    return np.nansum(groups, -1, keepdims=True) / count


def _deviation(groups: Float64[np.ndarray, "g n"]) -> Float64[np.ndarray, "g 1"]:
    """Return the sample standard deviation of each group; 0 for a single value."""
    count = np.maximum(np.sum(~np.isnan(groups), -1, keepdims=True) - 1, 1)
    return np.sqrt(np.nansum((groups - _mean(groups)) ** 2, -1, keepdims=True) / count)
