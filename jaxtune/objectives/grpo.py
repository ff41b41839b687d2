"""Learning from rewards: GRPO (Shao et al. 2024, arXiv:2402.03300) and its variants, as in TRL.

A document is one prompt and its completion; only the completion's tokens have a loss weight.

Shape letters: n completions of a group or of a step, g groups, f reward functions, b rows, s positions of a row.
"""

from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float64

from jaxtune.columns import ADVANTAGE, NEXT_TOKEN, OLD_LOG_PROB, SAMPLED_LOG_PROB
from jaxtune.models.head.score import Batch, ScoreOptions, Scores
from jaxtune.objectives.document_sums import sum_own_document
from jaxtune.objectives.objective import Objective, Sums
from jaxtune.objectives.options import GrpoOptions, RolloutOptions
from jaxtune.objectives.rollout_correction import LARGEST_LOG_RATIO, correction_weights

EPSILON = 1e-4  # added to a standard deviation, as in TRL

Rows = Float[Array, "b s"]


class PolicyLoss(NamedTuple):
    """A loss of completions.

    Attributes:
        term: (options, importance ratio, advantage, log-probability) -> the loss of each token.
        mean: what the loss is a mean of: all tokens of a step, completions of their token mean, or completions of
            their token sum / rollout.max_new_tokens.
        clips: the bounds of the ratio whose crossings are counted as metrics.
    """

    term: Callable[[GrpoOptions, Rows, Rows, Rows], Rows]
    mean: Literal["tokens", "token means", "token sums"]
    clips: tuple[Literal["low", "high"], ...] = ()


def _range(options: GrpoOptions) -> tuple[float, float]:
    return 1 - options.clip_low, 1 + (options.clip_low if options.clip_high is None else options.clip_high)


def _clipped_loss(options: GrpoOptions, ratio: Rows, advantage: Rows, log_prob: Rows) -> Rows:
    # clip_largest is the second clip of INTELLECT-2, TRL's delta.
    clipped, ratio = jnp.clip(ratio, *_range(options)), jnp.minimum(ratio, options.clip_largest or jnp.inf)
    return -jnp.minimum(ratio * advantage, clipped * advantage)  # PPO, arXiv:1707.06347, equation 7


def _weighted_loss(options: GrpoOptions, ratio: Rows, advantage: Rows, log_prob: Rows) -> Rows:
    """CISPO (MiniMax-M1, arXiv:2506.13585): every token keeps a gradient, however far its ratio is off."""
    return -jax.lax.stop_gradient(jnp.minimum(ratio, _range(options)[1])) * advantage * log_prob


def _gated_loss(options: GrpoOptions, ratio: Rows, advantage: Rows, log_prob: Rows) -> Rows:
    """SAPO (arXiv:2511.20347): the gradient fades as the ratio leaves 1; at 1 it is the one of the ratio itself."""
    steepness = jnp.where(advantage > 0, options.sapo_positive, options.sapo_negative)
    return -4 / steepness * jax.nn.sigmoid(steepness * (ratio - 1)) * advantage


LOSSES = {
    "grpo": PolicyLoss(_clipped_loss, "token means", ("low", "high")),
    "dr_grpo": PolicyLoss(_clipped_loss, "token sums", ("low", "high")),
    "dapo": PolicyLoss(_clipped_loss, "tokens", ("low", "high")),
    "cispo": PolicyLoss(_weighted_loss, "tokens", ("high",)),
    "sapo": PolicyLoss(_gated_loss, "token means"),
}
# Estimators of KL(model || reference) from r = log(reference / model) at a token that the model sampled.
DIVERGENCES: dict[str, Callable[[Rows], Rows]] = {
    "k1": lambda r: -r,
    "k2": lambda r: r**2 / 2,
    "k3": lambda r: jnp.expm1(r) - r,  # never negative
}


def grpo(options: GrpoOptions, rollout: RolloutOptions) -> Objective:
    """Return the objective for rows with advantages.

    The sampling temperature of the completions divides the logits here too. With more than one iteration, or a
    correction of the rollouts, rows also have the log-probabilities from before the first iteration; otherwise the
    ratio is 1, but its gradient is not 0. Metrics: clip_ratio/low and clip_ratio/high, the shares of tokens (of
    completions, if importance is of completions) with a clipped ratio; and kl, if beta is above 0.
    """
    corrects = rollout.corrects != "none"
    columns = (*NEXT_TOKEN, ADVANTAGE)
    columns += (OLD_LOG_PROB,) if options.iterations > 1 or corrects else ()
    columns += (SAMPLED_LOG_PROB,) if corrects else ()
    counts = "target_tokens" if LOSSES[options.loss].mean == "tokens" else "completions"
    score = ScoreOptions(temperature=rollout.temperature)
    return Objective(partial(_sums, options, rollout), columns, options.beta > 0, score, counts=counts)


def _sums(options: GrpoOptions, rollout: RolloutOptions, scores: Scores, batch: Batch) -> Sums:
    mask = (batch["loss_weight"] > 0).astype(jnp.float32)
    of_completion = partial(sum_own_document, segment_ids=batch["segment_ids"])
    tokens = jnp.maximum(of_completion(mask), 1)
    # Without stored log-probabilities the current ones are the old ones: the ratio is 1 and only has a gradient.
    old = batch.get(OLD_LOG_PROB.name, jax.lax.stop_gradient(scores.log_prob))
    log_ratio, advantage = (scores.log_prob - old) * mask, batch[ADVANTAGE.name]
    counted = mask
    if options.importance != "token":  # one ratio for each completion, at all of its tokens
        log_ratio = of_completion(log_ratio)
        log_ratio = log_ratio / tokens if options.importance == "sequence" else log_ratio
        counted = mask / tokens
    ratio = jnp.exp(jnp.minimum(log_ratio, LARGEST_LOG_RATIO))
    loss, (low, high) = LOSSES[options.loss], _range(options)
    losses = loss.term(options, ratio, advantage, scores.log_prob)
    # In other cases the minimum takes the term that is not clipped, and the ratio keeps its gradient.
    clipped = {"low": (ratio < low) & (advantage < 0), "high": (ratio > high) & (advantage > 0)}
    metrics = {f"clip_ratio/{end}": (jnp.sum(clipped[end] * counted), jnp.sum(counted)) for end in loss.clips}
    if options.off_policy_kl is not None:
        losses *= _on_policy(options.off_policy_kl, scores.log_prob, batch.get(SAMPLED_LOG_PROB.name, old), batch)
    if rollout.corrects != "none":
        losses *= correction_weights(rollout, old, batch[SAMPLED_LOG_PROB.name], mask, batch["segment_ids"])
    if options.beta:
        assert scores.reference is not None
        kl = DIVERGENCES[options.kl]((scores.reference - scores.log_prob) * mask)
        kl = kl * ratio if options.kl_ratio else kl  # DeepSeek-V3.2
        losses += options.beta * kl
        metrics["kl"] = jnp.sum(kl * mask), jnp.sum(mask)
    if loss.mean == "tokens":
        return Sums(jnp.sum(losses * mask), jnp.sum(mask, dtype=jnp.int32), metrics)
    # Documents of a row have the numbers 1, 2, ...: the largest is their count.
    completions = jnp.sum(jnp.max(batch["segment_ids"], -1), dtype=jnp.int32)
    # GRPO divides by each completion's length; Dr. GRPO by a constant, which removes the bias by length.
    length = tokens if loss.mean == "token means" else rollout.max_new_tokens
    return Sums(jnp.sum(losses * mask / length), completions, metrics)


def _on_policy(largest: float, log_prob: Rows, sampled: Rows, batch: Batch) -> Rows:
    """Return 0 for completions to be made less likely that already are, by `largest` nats a token, else 1."""
    of_completion = partial(sum_own_document, segment_ids=batch["segment_ids"])
    known = (batch["loss_weight"] > 0) & ~jnp.isnan(sampled)
    fallen = of_completion(jnp.where(known, sampled - jax.lax.stop_gradient(log_prob), 0))
    tokens = jnp.maximum(of_completion((batch["loss_weight"] > 0).astype(jnp.float32)), 1)
    return ((batch[ADVANTAGE.name] >= 0) | (fallen / tokens <= largest)).astype(jnp.float32)


def advantages(rewards: Float64[np.ndarray, " n"], group_size: int, scale: str) -> Float64[np.ndarray, " n"]:
    """Return the difference of each reward from the mean of its group of `group_size` consecutive rewards, scaled.

    scale: grpo.advantage_scale, except gdpo. A reward of NaN is missing: it is left out of means, and its advantage is
    0. For rloo (Ahmadian et al. 2024, arXiv:2402.14740) the mean is the one of the other completions of the group.
    """
    groups, known = rewards.reshape(-1, group_size), ~np.isnan(rewards)
    above = groups - _mean(groups)
    if scale == "rloo":
        count = np.sum(~np.isnan(groups), -1, keepdims=True)
        # A value less the mean of the n - 1 others is n / (n - 1) times its difference from the mean of all.
        above *= count / np.maximum(count - 1, 1)
    above = above.reshape(-1)
    if scale in ("group", "batch"):
        among = groups if scale == "group" else rewards[None]
        above /= np.broadcast_to(_deviation(among), groups.shape).reshape(-1) + EPSILON
    return np.where(known, above, 0)


def gdpo_advantages(
    each: Float64[np.ndarray, "n f"], weights: Float64[np.ndarray, " f"], group_size: int
) -> Float64[np.ndarray, " n"]:
    """Return advantages from rewards that are first scaled by function and group (GDPO, arXiv:2601.05242).

    So a function whose rewards vary little still counts. A reward of NaN is missing, as in `advantages`.
    """
    scaled = np.stack([advantages(rewards, group_size, "group") for rewards in each.T], -1)
    unknown = np.isnan(each).all(-1)
    return advantages(np.where(unknown, np.nan, scaled @ weights), len(each), "batch")


def keep_uncertain(
    advantage: Float64[np.ndarray, " t"], entropies: Float64[np.ndarray, " t"], share: float
) -> Float64[np.ndarray, " t"]:
    """Return the advantages of a step's tokens, 0 except at the `share` of them with the largest entropies, as in TRL.

    Without its advantage, a token has only the loss of the KL divergence. The entropy of a token that is not trained
    is NaN.
    """
    if share == 1 or np.isnan(entropies).all():
        return advantage
    return np.where(entropies >= np.nanquantile(entropies, 1 - share), advantage, 0)


def _mean(groups: Float64[np.ndarray, "g n"]) -> Float64[np.ndarray, "g 1"]:
    count = np.maximum(np.sum(~np.isnan(groups), -1, keepdims=True), 1)
    return np.nansum(groups, -1, keepdims=True) / count


def _deviation(groups: Float64[np.ndarray, "g n"]) -> Float64[np.ndarray, "g 1"]:
    """Return the sample standard deviation of each group; 0 for a single value."""
    count = np.maximum(np.sum(~np.isnan(groups), -1, keepdims=True) - 1, 1)
    return np.sqrt(np.nansum((groups - _mean(groups)) ** 2, -1, keepdims=True) / count)
