"""Muon and NorMuon: rules that orthogonalise the momentum, for matrices (o, i) or stacked matrices (layers, o, i)."""

import math
from typing import Literal

import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxtune.optim.orthogonalize import orthogonalize
from jaxtune.optim.rules import Rule, descend

NEURON_EPSILON = 1e-10


def muon(
    momentum: float,
    nesterov: bool,
    ns_steps: int,
    adjust_lr: Literal["original", "match_rms_adamw"],
    dtype: DTypeLike = jnp.bfloat16,
) -> Rule:
    """Muon (Jordan et al. 2024), as torch.optim.Muon.

    The momentum is a mean, momentum * mean + (1 - momentum) * gradient, and Nesterov's step applies the same formula
    once more. Momentum as a plain sum differs by a factor, which orthogonalisation removes. Unlike here,
    optax.contrib.muon corrects Nesterov's step for the mean's start from zero, which changes the mix of gradient and
    momentum in the first steps.

    adjust_lr: factor on the learning rate of a matrix (rows, columns). "original": sqrt(max(1, rows / columns))
    (Jordan). "match_rms_adamw": 0.2 * sqrt(max(rows, columns)), which gives AdamW's typical root mean square (Liu et
    al. 2025, arXiv:2502.16982).
    dtype: dtype of the factors in `orthogonalize`.
    """

    def update(gradient, state, parameter, at):
        mean = momentum * state["momentum"] + (1.0 - momentum) * gradient  # buf.lerp_(grad, 1 - momentum) in torch
        ahead = momentum * mean + (1.0 - momentum) * gradient if nesterov else mean
        rows, columns = parameter.shape[-2:]
        original = adjust_lr == "original"
        factor = math.sqrt(max(1.0, rows / columns)) if original else 0.2 * math.sqrt(max(rows, columns))
        return descend(parameter, factor * orthogonalize(ahead, ns_steps, dtype), at), {"momentum": mean}

    return Rule(lambda parameter: {"momentum": jnp.zeros_like(parameter)}, update)


def normuon(momentum: float, beta2: float, ns_steps: int, cautious_wd: bool, dtype: DTypeLike = jnp.bfloat16) -> Rule:
    """NorMuon (Li et al. 2025, arXiv:2510.05491, algorithm 1).

    The update is the orthogonalised mean of gradients. Each row (neuron) is divided by the root of its second moment,
    and the result is scaled to a root mean square of 0.2. This follows the paper. The authors' code differs: it has
    Nesterov's momentum, and instead of 0.2 it uses the norm of the orthogonalised matrix times Muon's
    sqrt(max(1, rows / columns)).

    cautious_wd: decay only weights that the update does not move away from zero (Chen et al. 2025, arXiv:2510.12402).
    dtype: dtype of the factors in `orthogonalize`.
    """

    def init(parameter):
        # "row" has a number for each row: (o,), or (layers, o) for a stack.
        return {"momentum": jnp.zeros_like(parameter), "row": jnp.zeros_like(jnp.sum(parameter, axis=-1))}

    def update(gradient, state, parameter, at):
        mean = momentum * state["momentum"] + (1.0 - momentum) * gradient
        orthogonal = orthogonalize(mean, ns_steps, dtype)
        row = beta2 * state["row"] + (1.0 - beta2) * jnp.mean(orthogonal * orthogonal, axis=-1)
        normal = orthogonal / (jnp.sqrt(row)[..., None] + NEURON_EPSILON)
        mean_square = jnp.mean(normal * normal, axis=(-2, -1), keepdims=True)
        direction = 0.2 * normal / jnp.maximum(jnp.sqrt(mean_square), NEURON_EPSILON)
        if cautious_wd:
            at = at._replace(decay=jnp.where(direction * parameter >= 0.0, at.decay, 0.0))
        return descend(parameter, direction, at), {"momentum": mean, "row": row}

    return Rule(init, update)
