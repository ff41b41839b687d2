"""Next-token cross-entropy over packed rows."""

import jax
import jax.numpy as jnp

from jaxtune.models.head.score import Batch, ScoreOptions, Scores, TotalScores
from jaxtune.objectives.objective import Objective, Sums


def cross_entropy(z_loss: float = 0.0, label_smoothing: float = 0.0) -> Objective:
    """Return the objective (-log p(target) + z_loss * logsumexp(logits)^2) * loss_weight.

    It is a sum divided by the number of tokens with a loss_weight. label_smoothing: the share of a target that is
    spread over the vocabulary.
    """
    return Objective(_sums, score=ScoreOptions(z_loss, label_smoothing, total=True))


def dynamic_fine_tuning() -> Objective:
    """Return the objective -p(target) * log p(target) * loss_weight, where p gets no gradient (arXiv:2508.05629).

    The gradient of cross-entropy is the one of a reward of 1 / p(target), which is large for unlikely targets; here the
    reward is 1 for each. As TRL's loss_type="dft".
    """
    return Objective(_weighted_sums)


def _weighted_sums(scores: Scores, batch: Batch) -> Sums:
    loss = jax.lax.stop_gradient(jnp.exp(scores.log_prob)) * scores.loss
    return Sums(jnp.sum(loss), jnp.sum(batch["loss_weight"] > 0, dtype=jnp.int32))


def token_accuracy() -> Objective:
    """Return next-token cross-entropy for evaluation, with the metric token_accuracy."""
    return Objective(_with_accuracy, score=ScoreOptions(hits=True, total=True))


def _sums(scores: TotalScores, batch: Batch) -> Sums:
    return Sums(jnp.sum(scores.total), jnp.sum(batch["loss_weight"] > 0, dtype=jnp.int32))


def _with_accuracy(scores: TotalScores, batch: Batch) -> Sums:
    sums = _sums(scores, batch)
    assert scores.hits is not None
    # An integer count, because float32 cannot count all tokens of a large evaluation exactly.
    right = jnp.sum(scores.hits, dtype=jnp.int32)
    return sums._replace(metrics={"token_accuracy": (right, sums.weight)})
