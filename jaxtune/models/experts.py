"""A mixture of experts (Shazeer et al. 2017): a router chooses a few feed-forward layers for each token."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxtune.models import spec as specs
from jaxtune.models.call import Call
from jaxtune.models.declared import declared
from jaxtune.models.mlp import MLP
from jaxtune.parallel.layout import P, gather

TINY = 1e-20  # as in transformers


class Routing(NamedTuple):
    """Which experts a token goes to.

    probability: of every expert. chosen, weights: the `active` ones, and what multiplies their outputs; float32.
    """

    probability: Float[Array, "b s e"]
    chosen: Int[Array, "b s k"]
    weights: Float[Array, "b s k"]


class Router(nnx.Module):
    """Chooses experts for each token by their scores."""

    def __init__(self, spec: specs.ModelSpec, options: specs.Experts):
        init = nnx.initializers.normal(spec.initializer_range)
        self.weight = declared((options.count, spec.hidden), (None, "embed"), init, "router", options.float32)
        zeros = nnx.initializers.zeros
        self.bias = declared((options.count,), (None,), zeros, "vector") if options.router_bias else None
        self.correction = declared((options.count,), (None,), zeros, "correction", True) if options.corrected else None
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
        probability = jax.nn.sigmoid(logits) if options.scores == "sigmoid" else jax.nn.softmax(logits, axis=-1)
        chosen = jax.lax.top_k(self._ranked(probability), options.active)[1]
        weights = jnp.take_along_axis(probability, chosen, axis=-1)
        if options.normalized:
            weights /= weights.sum(-1, keepdims=True) + TINY
        return Routing(probability, chosen, weights * options.scale)

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


class Experts(nnx.Module):
    """The sum of the chosen experts' outputs, each times its weight, and what all tokens pass.

    Every expert computes every token, one expert after another, and most results are multiplied by zero: correct, and
    as slow as all experts together. Each parameter of an expert has a leading axis of experts, which is scanned.
    """

    def __init__(self, spec: specs.ModelSpec, layer: specs.Layer, options: specs.Experts):
        def feed_forward(size: int, name: str) -> MLP:
            return MLP(spec, layer, specs.FeedForward(size, options.bias, options.activation), f"mlp.{name}")

        self.router = Router(spec, options)
        self.experts = feed_forward(options.size, "experts")
        self.shared = feed_forward(options.shared, "shared") if options.shared else None
        self.options = options

    def __call__(
        self, x: Float[Array, "b s d"], call: Call, valid: Bool[Array, "b s"]
    ) -> tuple[Float[Array, "b s d"], dict[str, Float[Array, "..."]]]:
        """The output, and sums over the tokens that are `valid` for `objectives.balanced`.

        router_choices (e): how often each expert is chosen. router_probability (e): the sum of its probabilities.
        router_tokens: the number of these tokens.
        """
        probability, chosen, weights = self.router(x)
        is_chosen = jax.nn.one_hot(chosen, self.options.count, dtype=jnp.float32)  # (b, s, active, e)
        by_expert = jnp.moveaxis((is_chosen * weights.astype(x.dtype).astype(jnp.float32)[..., None]).sum(-2), -1, 0)
        graph, values = nnx.split(self.experts)

        # No activation of an expert is saved for the backward pass: those of all experts would be several times those
        # of a layer.
        @jax.checkpoint
        def add(total: Array, scanned: tuple) -> tuple[Array, None]:
            values, weight, number = scanned
            y = nnx.merge(graph, values)(x, call.layer(number))
            return total + weight[..., None] * y.astype(jnp.float32), None

        zeros = jnp.zeros_like(x, jnp.float32)
        total, _ = jax.lax.scan(add, zeros, (values, by_expert, jnp.arange(self.options.count)))
        over_tokens = partial(jnp.einsum, "bse,bs->e", out_sharding=P())
        counted = valid.astype(jnp.float32)
        sums = {
            "router_choices": over_tokens(is_chosen.sum(-2), counted),
            "router_probability": over_tokens(probability, counted),
            "router_tokens": jnp.sum(counted),
        }
        y = total.astype(x.dtype)
        return (y if self.shared is None else y + self.shared(x, call)), sums
