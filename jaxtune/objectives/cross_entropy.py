"""Next-token cross-entropy over packed rows."""

import jax.numpy as jnp

from jaxtune.models.score import Batch, Scores
from jaxtune.objectives.objective import Objective, Sums


def cross_entropy(z_loss: float = 0.0, label_smoothing: float = 0.0) -> Objective:
    """(-log p(target) + z_loss * logsumexp(logits)^2) * loss_weight, over the number of tokens that have a weight.

    label_smoothing: the share of a target that is divided over the vocabulary.
    """
    return Objective(_sums, z_loss=z_loss, label_smoothing=label_smoothing)


def token_accuracy() -> Objective:
    """Next-token cross-entropy to evaluate by, with how many targets are the likeliest token."""
    return Objective(_with_accuracy, hits=True)


def _sums(scores: Scores, batch: Batch) -> Sums:
    return Sums(jnp.sum(scores.loss), jnp.sum(batch["loss_weight"] > 0, dtype=jnp.int32))


def _with_accuracy(scores: Scores, batch: Batch) -> Sums:
    sums = _sums(scores, batch)
    assert scores.hits is not None
    # A count in integers: a float32 has too few digits for the tokens of a large evaluation.
    right = jnp.sum(scores.hits, dtype=jnp.int32)
    return sums._replace(metrics={"token_accuracy": (right, sums.weight)})
