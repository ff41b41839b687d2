"""The load of a mixture of experts, and the losses that balance it, beside another objective."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxtune.models.score import Batch, LabelScores, Scores
from jaxtune.objectives.objective import Objective, Sums


def balanced(
    objective: Objective,
    weight: float,
    over: Literal["batch", "sequence"] = "batch",
    z_weight: float = 0.0,
    corrections: Mapping[str, Sequence[int]] = {},
) -> Objective:
    """The objective plus weight times the router's loss, and z_weight times its z-loss, of each micro-batch.

    Both are means over layers, as in transformers; DeepSeek-V3 and ST-MoE add up what layers have, so that their
    weights mean as much as these do times the number of layers with experts.

    corrections: the names of those that the load moves, with the number of each stacked layer among those with experts;
    their direction is by how much the choices of an expert exceed the mean of its layer (`optim.rules.balancing`).

    Metrics: router_loss and router_z_loss; expert_load_max, tokens of the busiest expert over those of an even load,
    and expert_load_entropy, of the experts' shares of the load, 1 if even: means over layers; expert_load_worst, the
    expert_load_max of the layer where it is largest.
    """

    def loss(scores: Scores | LabelScores, batch: Batch) -> Sums:
        sums = objective.loss(scores, batch)
        own = sums.weight.astype(jnp.float32)
        router, z = LOSSES[over](scores, batch), z_loss(scores, batch)
        found = {"router_loss": router, "router_z_loss": z, **_load(scores)}
        metrics = {name: (value * own, own) for name, value in found.items()}
        penalty = sum(factor * value for factor, value in ((weight, router), (z_weight, z)) if factor)
        choices = scores.sums["router_choices"].sum(1)
        excess = choices - choices.mean(-1, keepdims=True)
        directions = {name: excess[np.array(layers)] for name, layers in corrections.items()}
        return Sums(sums.loss + penalty * own, sums.weight, {**sums.metrics, **metrics}, directions)

    return dataclasses.replace(objective, loss=loss)


def batch_loss(scores: Scores | LabelScores, batch: Batch) -> Float[Array, ""]:
    """How unevenly experts are chosen (Switch Transformer, arXiv:2101.03961), over tokens and layers.

    As transformers' load_balancing_loss_func: (number of experts) * sum over experts of (choices per token * mean
    probability). An even choice gives the number of experts that a token chooses.
    """
    choices, probability = scores.sums["router_choices"], scores.sums["router_probability"]
    tokens = jnp.maximum(_tokens(batch).sum(), 1.0) * len(choices)
    return choices.shape[-1] * jnp.sum(choices.sum((0, 1)) / tokens * (probability.sum((0, 1)) / tokens))


def sequence_loss(scores: Scores | LabelScores, batch: Batch) -> Float[Array, ""]:
    """How unevenly the tokens of a row choose experts (DeepSeek-V3, arXiv:2412.19437, equations 17 to 20).

    (number of experts) * sum over experts of (share of the choices * mean probability), 1 if even. A row is a sequence:
    the documents packed into it balance together. A mean over rows, each weighed by its number of tokens, as are
    micro-batches by that of their targets: it hardly matters which rows make up one.
    """
    choices, probability = scores.sums["router_choices"], scores.sums["router_probability"]
    shares = choices / jnp.maximum(choices.sum(-1, keepdims=True), 1.0)
    tokens = _tokens(batch)
    mean = probability / jnp.maximum(tokens, 1.0)[:, None]
    of_rows = choices.shape[-1] * (shares * mean).sum(-1).mean(0)
    return jnp.sum(of_rows * tokens) / jnp.maximum(tokens.sum(), 1.0)


LOSSES = {"batch": batch_loss, "sequence": sequence_loss}


def z_loss(scores: Scores | LabelScores, batch: Batch) -> Float[Array, ""]:
    """The mean square of the logarithm of the sum of exponentials of the logits (ST-MoE, arXiv:2202.08906, equation 5).

    Over tokens and layers, as router_z_loss_func of transformers.
    """
    return scores.sums["router_z"].mean(0).sum() / jnp.maximum(_tokens(batch).sum(), 1.0)


def _tokens(batch: Batch) -> Float[Array, " b"]:
    """The number of each row's tokens, without padding."""
    return jnp.sum(batch["segment_ids"] > 0, -1, dtype=jnp.float32)


def _load(scores: Scores | LabelScores) -> dict[str, Float[Array, ""]]:
    """How even the load of each layer is, in several ways."""
    choices = scores.sums["router_choices"].sum(1)
    shares = choices / jnp.maximum(choices.sum(-1, keepdims=True), 1.0)
    count = choices.shape[-1]
    busiest = count * shares.max(-1)
    entropy = jax.scipy.special.entr(shares).sum(-1) / math.log(count)
    return {
        "expert_load_max": busiest.mean(),
        "expert_load_worst": busiest.max(),
        "expert_load_entropy": entropy.mean(),
    }
