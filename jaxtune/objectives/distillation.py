"""Distillation of a teacher's next-token distribution, over packed rows (Hinton et al. 2015, arXiv:1503.02531; GKD)."""

from functools import partial

import jax.numpy as jnp

from jaxtune.columns import NEXT_TOKEN, teacher_columns
from jaxtune.models.head.divergence import Divergence
from jaxtune.models.head.score import Batch, ScoreOptions, Scores
from jaxtune.objectives.objective import Objective, Sums
from jaxtune.objectives.options import DistillOptions


def distillation(options: DistillOptions, z_loss: float = 0.0, label_smoothing: float = 0.0) -> Objective:
    """Return the objective (weight * divergence + (1 - weight) * cross-entropy) * loss_weight.

    It is a mean over tokens with a loss_weight. As in TRL's GKD, the divergence is not multiplied by the squared
    temperature. The cross-entropy is the same as in `objectives.cross_entropy`, with z-loss and label smoothing.
    Metrics: divergence and cross_entropy per token.
    """
    divergence = Divergence(options.divergence, options.js_beta, options.temperature)
    return Objective(
        partial(_sums, options.weight),
        (*NEXT_TOKEN, *teacher_columns(options.top_k)),
        score=ScoreOptions(z_loss, label_smoothing, divergence),
    )


def _sums(weight: float, scores: Scores, batch: Batch) -> Sums:
    assert scores.divergence is not None
    tokens = jnp.sum(batch["loss_weight"] > 0, dtype=jnp.int32)
    divergence, cross_entropy = jnp.sum(scores.divergence * batch["loss_weight"]), jnp.sum(scores.loss)
    loss = weight * divergence + ((1 - weight) * cross_entropy if weight < 1 else 0.0)
    return Sums(loss, tokens, {"divergence": (divergence, tokens), "cross_entropy": (cross_entropy, tokens)})
