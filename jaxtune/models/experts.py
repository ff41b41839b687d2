"""A mixture of experts (Shazeer et al. 2017): a router chooses a few feed-forward layers for each token."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from jaxtune.models import spec as specs
from jaxtune.models.call import Call
from jaxtune.models.declared import declared
from jaxtune.models.mlp import MLP
from jaxtune.parallel.layout import P, gather


class Router(nnx.Module):
    """A score of every expert for every token."""

    def __init__(self, spec: specs.ModelSpec, count: int):
        init = nnx.initializers.normal(spec.initializer_range)
        self.weight = declared((count, spec.hidden), (None, "embed"), init, "router")

    def __call__(self, x: Float[Array, "b s d"]) -> Float[Array, "b s e"]:
        """Probabilities in float32, of logits in the dtype of x, as in transformers."""
        weight = gather(self.weight.get_value().astype(x.dtype))
        return jax.nn.softmax(jnp.einsum("bsd,ed->bse", x, weight).astype(jnp.float32), axis=-1)


class Experts(nnx.Module):
    """The sum of the chosen experts' outputs, each times its probability.

    Every expert computes every token, one expert after another, and most results are multiplied by zero: correct, and
    as slow as all experts together. Each parameter of an expert has a leading axis of experts, which is scanned.
    """

    def __init__(self, spec: specs.ModelSpec, layer: specs.Layer, options: specs.Experts):
        self.router = Router(spec, options.count)
        expert = specs.FeedForward(options.size, activation=options.activation)
        self.experts = MLP(spec, layer, expert, "mlp.experts")
        self.options = options

    def __call__(
        self, x: Float[Array, "b s d"], call: Call, valid: Bool[Array, "b s"]
    ) -> tuple[Float[Array, "b s d"], dict[str, Float[Array, "..."]]]:
        """The output, and sums over the tokens that are `valid` for `objectives.balanced`.

        router_choices (e): how often each expert is chosen. router_probability (e): the sum of its probabilities.
        router_tokens: the number of these tokens.
        """
        probability = self.router(x)
        weights, chosen = jax.lax.top_k(probability, self.options.active)
        if self.options.normalized:
            weights = weights / weights.sum(-1, keepdims=True)
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
        return total.astype(x.dtype), sums
