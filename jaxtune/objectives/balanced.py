"""The load of a mixture of experts, and the loss that balances it, beside another objective."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxtune.models.score import Batch, LabelScores, Scores
from jaxtune.objectives.objective import Objective, Sums

LOAD = ("expert_load_max", "expert_load_entropy")


def balanced(objective: Objective, coefficient: float) -> Objective:
    """The objective plus coefficient times the router's loss of each micro-batch, as transformers adds it.

    Metrics: router_loss; and means over layers of expert_load_max and expert_load_entropy (`models.experts`).
    """

    def loss(scores: Scores | LabelScores, batch: Batch) -> Sums:
        sums = objective.loss(scores, batch)
        router, weight = router_loss(scores), sums.weight.astype(jnp.float32)
        load = {name: scores.sums[name] / scores.sums["expert_layers"] for name in LOAD}
        metrics = {name: (value * weight, weight) for name, value in {"router_loss": router, **load}.items()}
        loss = sums.loss + coefficient * router * weight if coefficient else sums.loss
        return Sums(loss, sums.weight, {**sums.metrics, **metrics})

    return dataclasses.replace(objective, loss=loss)


def router_loss(scores: Scores | LabelScores) -> Float[Array, ""]:
    """How unevenly experts are chosen (Switch Transformer, arXiv:2101.03961), over tokens and layers.

    As transformers' load_balancing_loss_func: (number of experts) * sum over experts of (choices per token * mean
    probability). An even choice gives the number of experts that a token chooses.
    """
    sums = scores.sums
    tokens = jnp.maximum(sums["router_tokens"], 1.0)
    shares, probability = sums["router_choices"] / tokens, sums["router_probability"] / tokens
    return len(shares) * jnp.sum(shares * probability)
