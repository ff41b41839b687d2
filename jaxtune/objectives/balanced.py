"""Losses that balance the load of a mixture of experts, added to another objective; and metrics of the load.

Shape letters: b rows of a micro-batch; sums over tokens are (mixtures, b, experts). A layer has one mixture, or two, of
texts and of images, which follow one another.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxtune.models.head.score import AnyScores, Batch
from jaxtune.objectives.objective import Objective, Sums
from jaxtune.parallel.layout import P


def add_balancing(
    objective: Objective,
    weight: float,
    over: Literal["batch", "sequence"] = "batch",
    z_weight: float = 0.0,
    corrections: Mapping[str, Sequence[int]] = {},
) -> Objective:
    """Return the objective plus weight times the router's loss and z_weight times its z-loss, per micro-batch.

    Both losses are means over layers, as in transformers. DeepSeek-V3 and ST-MoE sum over layers, so a weight from
    there corresponds to that weight times the number of layers with experts here.

    corrections: names of the corrections that the load updates; for each, the indices of its stacked layers among the
    mixtures. Their direction is an expert's choices minus the mean of its mixture (`optim.rules.balancing`).

    Metrics, as means over the mixtures that have tokens:
    - router_loss and router_z_loss;
    - expert_load_max: tokens of the busiest expert, divided by the tokens of an even load;
    - expert_load_entropy: entropy of the experts' shares of the load, 1 if even;
    - expert_load_worst: not a mean, but the expert_load_max of the mixture with the largest.
    """

    def loss(scores: AnyScores, batch: Batch) -> Sums:
        sums = objective.loss(scores, batch)
        # Times the micro-batch's weight: the step divides all sums by the total weight, which leaves a weighted mean.
        total_weight = sums.weight.astype(jnp.float32)
        router, z = LOSSES[over](scores), z_loss(scores)
        values = {"router_loss": router, "router_z_loss": z, **_load(scores)}
        metrics = {name: (value * total_weight, total_weight) for name, value in values.items()}
        penalty = sum(factor * value for factor, value in ((weight, router), (z_weight, z)) if factor)
        # A direction in place of a gradient: the choice of experts has none (see `optim.rules.balancing`).
        choices = _by_mixture(scores, "router_choices").sum(1)  # (mixtures, experts)
        excess = choices - choices.mean(-1, keepdims=True)
        directions = {name: excess[np.array(layers)] for name, layers in corrections.items()}
        return Sums(sums.loss + penalty * total_weight, sums.weight, {**sums.metrics, **metrics}, directions)

    return dataclasses.replace(objective, loss=loss)


def batch_loss(scores: AnyScores) -> Float[Array, ""]:
    """Return the load-balancing loss over tokens and layers (Switch Transformer, arXiv:2101.03961).

    As transformers' load_balancing_loss_func: (number of experts) * sum over experts of (choices per token * mean
    probability). For an even load it equals the number of experts that a token chooses. Experts with the same number in
    several mixtures, also those of texts and of images, are counted together, as there.
    """
    choices, probability = (_by_mixture(scores, f"router_{name}") for name in ("choices", "probability"))
    tokens = jnp.maximum(_by_mixture(scores, "router_tokens").sum(), 1.0)
    return choices.shape[-1] * jnp.sum(choices.sum((0, 1)) / tokens * (probability.sum((0, 1)) / tokens))


def sequence_loss(scores: AnyScores) -> Float[Array, ""]:
    """Return the load-balancing loss within sequences (DeepSeek-V3, arXiv:2412.19437, equations 17 to 20).

    (number of experts) * sum over experts of (share of the choices * mean probability), 1 if even. A sequence is a row:
    the documents packed into it are balanced together. It is a mean over rows weighted by their number of tokens, and
    micro-batches are weighted by their number of targets, so the grouping of rows into micro-batches hardly matters.
    """
    choices, probability = (_by_mixture(scores, f"router_{name}") for name in ("choices", "probability"))
    shares = choices / jnp.maximum(choices.sum(-1, keepdims=True), 1.0)  # f of equation 18, over the number of experts
    tokens = _by_mixture(scores, "router_tokens")  # (mixtures, b)
    mean = probability / jnp.maximum(tokens, 1.0)[..., None]  # P of equation 20
    losses = choices.shape[-1] * (shares * mean).sum(-1)  # (mixtures, b)
    return jnp.sum(losses * tokens) / jnp.maximum(tokens.sum(), 1.0)


LOSSES = {"batch": batch_loss, "sequence": sequence_loss}


def z_loss(scores: AnyScores) -> Float[Array, ""]:
    """Return the mean of logsumexp(router logits)^2 over tokens and layers (ST-MoE, arXiv:2202.08906, equation 5).

    As router_z_loss_func of transformers.
    """
    return scores.sums["router_z"].sum() / jnp.maximum(scores.sums["router_tokens"].sum(), 1.0)


def _by_mixture(scores: AnyScores, name: str) -> Float[Array, "mixtures b ..."]:
    """Return a sum of each mixture."""
    value = scores.sums[name]
    first = value.ndim - (3 if name in ("router_choices", "router_probability") else 2)  # (layers, mixtures, b, ...)
    if first == 0:  # (layers, b, ...): a layer has one mixture
        return value
    out = P(None, *jax.typeof(value).sharding.spec[2:])
    return jnp.reshape(value, (-1, *value.shape[2:]), out_sharding=out)


def _load(scores: AnyScores) -> dict[str, Float[Array, ""]]:
    """Return the metrics of the load, over mixtures (see `add_balancing`)."""
    choices = _by_mixture(scores, "router_choices").sum(1)  # (mixtures, experts)
    chosen = choices.sum(-1, keepdims=True)
    shares = choices / jnp.maximum(chosen, 1.0)
    count = choices.shape[-1]
    busiest = count * shares.max(-1)
    entropy = jax.scipy.special.entr(shares).sum(-1) / math.log(count)
    loaded = jnp.maximum(jnp.sum(chosen > 0, dtype=jnp.float32), 1.0)  # mixtures; without tokens all values are 0
    return {
        "expert_load_max": busiest.sum() / loaded,
        "expert_load_worst": busiest.max(),
        "expert_load_entropy": entropy.sum() / loaded,
    }
