"""A teacher's distribution of the next token, over packed rows (Hinton et al. 2015, arXiv:1503.02531; GKD)."""

from functools import partial

import jax.numpy as jnp

from jaxtune.columns import NEXT_TOKEN, of_teacher
from jaxtune.config.schema import Distill
from jaxtune.models.divergence import Divergence
from jaxtune.models.score import Batch, Scores
from jaxtune.objectives.objective import Objective, Sums


def distillation(options: Distill, z_loss: float = 0.0, label_smoothing: float = 0.0) -> Objective:
    """(weight * divergence + (1 - weight) * cross-entropy) * loss_weight, over the number of tokens that have a weight.

    The temperature's square does not multiply the divergence, as in TRL's GKD. The cross-entropy is that of
    `objectives.cross_entropy`, with its z-loss and label smoothing. Metrics: divergence and cross_entropy, a token.
    """
    divergence = Divergence(options.divergence, options.js_beta, options.temperature)
    return Objective(
        partial(_sums, options.weight),
        (*NEXT_TOKEN, *of_teacher(options.top_k)),
        z_loss=z_loss,
        label_smoothing=label_smoothing,
        divergence=divergence,
    )


def _sums(weight: float, scores: Scores, batch: Batch) -> Sums:
    assert scores.divergence is not None
    tokens = jnp.sum(batch["loss_weight"] > 0, dtype=jnp.int32)
    divergence, cross_entropy = jnp.sum(scores.divergence * batch["loss_weight"]), jnp.sum(scores.loss)
    loss = weight * divergence + ((1 - weight) * cross_entropy if weight < 1 else 0.0)
    return Sums(loss, tokens, {"divergence": (divergence, tokens), "cross_entropy": (cross_entropy, tokens)})
