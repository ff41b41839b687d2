"""The loss of multi-token-prediction modules, added to next-token cross-entropy; and their accuracy.

Shape letters: b rows of a micro-batch, s positions in a row.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Num

from jaxtune.columns import further_columns
from jaxtune.models.head.score import Batch, Scores, TotalScores
from jaxtune.objectives.objective import Objective, Sums


def add_further_tokens(objective: Objective, weight: float, modules: int, only: bool = False) -> Objective:
    """Return the objective plus weight times the mean over modules of their losses (DeepSeek-V3, equations 24 and 25).

    The loss of a module is its cross-entropy, divided by the number of the next-token targets, as in equation 24: a
    document has one target fewer for each module. only: without the objective's own loss.

    Metrics, each over the targets of the module or modules:
    - mtp_loss: mean cross-entropy of all modules;
    - mtp_accuracy/K: share of targets that are the likeliest token of module K, from 1.
    """

    def loss(scores: Scores | TotalScores, batch: Batch) -> Sums:
        sums = objective.loss(scores, batch)
        counts = jnp.sum(batch["further_loss_weight"] > 0, (0, 1), dtype=jnp.int32)  # (b, s, modules) -> (modules)
        total = jnp.sum(jnp.stack([one.loss for one in scores.further]))
        metrics: dict[str, tuple[Num[Array, ""], Array]] = {"mtp_loss": (total, jnp.sum(counts))}
        for number, one in enumerate(scores.further):
            metrics[f"mtp_accuracy/{number + 1}"] = jnp.sum(one.hits, dtype=jnp.int32), counts[number]
        added = total * (weight / modules) if weight else 0.0
        return sums._replace(loss=sums.loss + added, metrics={**sums.metrics, **metrics})

    return dataclasses.replace(
        objective,
        loss=loss,
        columns=(*objective.columns, *further_columns(modules)),
        score=objective.score._replace(further=True, next_token=not only),
    )
