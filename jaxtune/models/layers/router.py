"""The router of a mixture of experts: which of them a token goes to, and what their outputs are multiplied by."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxtune.models import spec as specs
from jaxtune.models.declared import declared
from jaxtune.parallel.layout import P, gather

TINY = 1e-20  # as in transformers


class Routing(NamedTuple):
    """Which experts a token goes to.

    probability: of every expert, its score over the sum of all. chosen, weights: the `active` ones, and what multiplies
    their outputs. log_sum: the logarithm of the sum of the exponentials of all logits. All float32.
    """

    probability: Float[Array, "b s e"]
    chosen: Int[Array, "b s k"]
    weights: Float[Array, "b s k"]
    log_sum: Float[Array, "b s"]


class Router(nnx.Module):
    """Chooses experts for each token by their scores."""

    def __init__(self, spec: specs.ModelSpec, options: specs.Experts):
        init = nnx.initializers.normal(spec.initializer_range)
        self.weight = declared((options.count, spec.hidden), (None, "embed"), init, "router", float32=options.float32)
        zeros = nnx.initializers.zeros
        self.bias = declared((options.count,), (None,), zeros, "vector") if options.router_bias else None
        correction = declared((options.count,), (None,), zeros, "correction", float32=True)
        self.correction = correction if options.corrected else None
        self.options = options

    def __call__(self, x: Float[Array, "b s d"]) -> Routing:
        """In float32, of logits in the dtype of x or float32, as in transformers."""
        options = self.options
        x = x.astype(jnp.float32) if options.float32 else x
        weight = gather(self.weight.get_value().astype(x.dtype))
        precision = "highest" if options.float32 else None  # no TF32 on a GPU, nor in the backward pass
        logits = jnp.einsum("bsd,ed->bse", x, weight, precision=precision)
        if self.bias is not None:
            logits += jax.reshard(self.bias.get_value().astype(x.dtype), P())
        logits = logits.astype(jnp.float32)
        scores = jax.nn.sigmoid(logits) if options.scores == "sigmoid" else jax.nn.softmax(logits, axis=-1)
        chosen = jax.lax.top_k(self._ranked(scores), options.active)[1]
        weights = jnp.take_along_axis(scores, chosen, axis=-1)
        if options.normalized:
            weights /= weights.sum(-1, keepdims=True) + TINY
        probability = scores if options.scores == "softmax" else scores / (scores.sum(-1, keepdims=True) + TINY)
        return Routing(probability, chosen, weights * options.scale, jax.nn.logsumexp(logits, axis=-1))

    def _ranked(self, scores: Float[Array, "b s e"]) -> Float[Array, "b s e"]:
        """Scores to choose by: corrected; outside the groups whose two best experts score highest, -inf."""
        options = self.options
        if self.correction is not None:
            scores += jax.reshard(self.correction.get_value(), P())
        if options.groups == 1:
            return scores
        by_group = scores.reshape(*scores.shape[:2], options.groups, -1)
        best = jax.lax.top_k(by_group, 2)[0].sum(-1)
        last = jax.lax.top_k(best, options.active_groups)[0][..., -1:]
        return jnp.where((best >= last)[..., None], by_group, -jnp.inf).reshape(scores.shape)
