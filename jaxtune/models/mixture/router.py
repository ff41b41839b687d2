"""The router of a mixture of experts: it chooses the experts of each token and the weights of their outputs.

Shape letters: b rows of the batch, s positions in a row, d features of the residual stream, e experts, k chosen experts
of a token.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxtune.models.declared import declare_parameter
from jaxtune.models.layers.norm import divide_by_rms
from jaxtune.models.structure import layer_spec
from jaxtune.models.structure.model_spec import ModelSpec
from jaxtune.parallel.layout import P, gather


class Routing(NamedTuple):
    """The experts of each token. All floats are float32.

    Attributes:
        probability: score of each expert over the sum of all scores.
        chosen: numbers of the chosen experts.
        weights: factors on the outputs of the chosen experts.
        log_sum: logsumexp of the router's logits.
    """

    probability: Float[Array, "b s e"]
    chosen: Int[Array, "b s k"]
    weights: Float[Array, "b s k"]
    log_sum: Float[Array, "b s"]

    def only(self, tokens: Bool[Array, "b s"]) -> "Routing":
        """Return the routing of some tokens; the others get numbers past the last expert, so they have none."""
        return self._replace(chosen=jnp.where(tokens[..., None], self.chosen, self.probability.shape[-1]))


class Router(nnx.Module):
    """Chooses experts for each token by their scores."""

    def __init__(self, spec: ModelSpec, options: layer_spec.Experts):
        init = nnx.initializers.normal(spec.initializer_range)
        self.weight = declare_parameter(
            (options.count, spec.hidden), (None, "embed"), init, "router", float32=options.float32
        )
        zeros = nnx.initializers.zeros
        self.bias = declare_parameter((options.count,), (None,), zeros, "vector") if options.router_bias else None
        correction = declare_parameter((options.count,), (None,), zeros, "correction", float32=True)
        self.correction = correction if options.corrected else None
        ones = nnx.initializers.ones
        self.scale = declare_parameter((spec.hidden,), (None,), ones, "vector") if options.parallel else None
        self.expert_scale = declare_parameter((options.count,), (None,), ones, "vector") if options.parallel else None
        self.epsilon = spec.norm.epsilon
        self.options = options

    @jax.named_scope("router")
    def __call__(self, x: Float[Array, "b s d"], replayed: Int[Array, "b s k"] | None = None) -> Routing:
        """Route tokens. As in transformers, logits are in the dtype of x or float32; the rest is float32.

        replayed: the experts to choose, whose weights are computed from the logits as always; -1: the router chooses.
        """
        options = self.options
        if self.scale is not None:
            # Gemma4TextRouter: a norm without weight, then scale * hidden_size^-0.5.
            x = divide_by_rms(x.astype(jnp.float32), self.epsilon).astype(x.dtype)
            x *= jax.reshard(self.scale.get_value().astype(x.dtype), P()) * x.shape[-1] ** -0.5
        x = x.astype(jnp.float32) if options.float32 else x
        weight = gather(self.weight.get_value().astype(x.dtype))
        precision = "highest" if options.float32 else None  # no TF32 on a GPU, nor in the backward pass
        logits = jnp.einsum("bsd,ed->bse", x, weight, precision=precision)
        if self.bias is not None:
            logits += jax.reshard(self.bias.get_value().astype(x.dtype), P())
        logits = logits.astype(jnp.float32)
        scores = jax.nn.sigmoid(logits) if options.scores == "sigmoid" else jax.nn.softmax(logits, axis=-1)
        chosen = jax.lax.top_k(self._rank(scores), options.active)[1]  # (b, s, k)
        if replayed is not None:
            chosen = jnp.where(replayed < 0, chosen, replayed)
        # The correction decides only which experts are chosen; weights come from the scores without it (DeepSeek-V3,
        # 2.1.2).
        weights = jnp.take_along_axis(scores, chosen, axis=-1)
        if options.normalized:
            weights /= weights.sum(-1, keepdims=True) + options.epsilon
        if self.expert_scale is not None:
            scales = jax.reshard(self.expert_scale.get_value().astype(jnp.float32), P())
            weights *= scales.at[chosen].get(out_sharding=jax.typeof(chosen).sharding)
        # Sigmoid scores do not sum to 1, and balancing losses need a distribution over experts.
        probability = scores
        if options.scores == "sigmoid":
            probability = scores / (scores.sum(-1, keepdims=True) + layer_spec.ROUTER_EPSILON)
        return Routing(probability, chosen, weights * options.scale, jax.nn.logsumexp(logits, axis=-1))

    def _rank(self, scores: Float[Array, "b s e"]) -> Float[Array, "b s e"]:
        """Return the scores by which experts are chosen: corrected, and -inf outside the best groups."""
        options = self.options
        if self.correction is not None:
            scores += jax.reshard(self.correction.get_value(), P())
        if options.groups == 1:
            return scores
        # DeepSeek-V3's node-limited routing: a token uses experts of few groups, and there a group is on one node.
        by_group = scores.reshape(*scores.shape[:2], options.groups, -1)  # (b, s, groups, e / groups)
        best = jax.lax.top_k(by_group, 2)[0].sum(-1)  # a group's score: the sum of its best two experts' scores
        last = jax.lax.top_k(best, options.active_groups)[0][..., -1:]  # (b, s, 1): the lowest score of an active group
        return jnp.where((best >= last)[..., None], by_group, -jnp.inf).reshape(scores.shape)
