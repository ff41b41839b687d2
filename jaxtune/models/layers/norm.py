"""Normalisation of features: RMSNorm and LayerNorm."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxtune.models.declared import declare_parameter
from jaxtune.models.structure import layer_spec
from jaxtune.parallel.layout import P


class NormLayer(nnx.Module):
    """x / rms(x) * weight over the last dimension, or the variant in `options`; computed in float32.

    `axis` is the logical name of that dimension.
    """

    def __init__(self, size: int, options: layer_spec.Norm, axis: str | None = None):
        start = nnx.initializers.zeros if options.offset else nnx.initializers.ones
        self.weight = declare_parameter((size,), (axis,), start, "vector") if options.weighted else None
        self.bias = declare_parameter((size,), (axis,), nnx.initializers.zeros, "vector") if options.bias else None
        self.options = options

    @jax.named_scope("norm")
    def __call__(self, x: Float[Array, "... d"]) -> Float[Array, "... d"]:
        """Return normalised x in the dtype of x.

        As in transformers, the weight is rounded to that dtype. The product is float32, so that the weight's gradient
        is summed over the tokens in float32.
        """
        wide = x.astype(jnp.float32)
        if self.options.centred:
            wide -= jnp.mean(wide, axis=-1, keepdims=True)
        normed = divide_by_rms(wide, self.options.epsilon)
        if self.weight is None:
            return normed.astype(x.dtype)
        if self.options.rounded:
            normed = normed.astype(x.dtype).astype(jnp.float32)

        def broadcastable(value: Array) -> Array:
            return jax.reshard(value.astype(x.dtype), P(jax.typeof(x).sharding.spec[-1])).astype(jnp.float32)

        weight = broadcastable(self.weight.get_value())
        y = normed * (1 + weight if self.options.offset else weight)
        return (y if self.bias is None else y + broadcastable(self.bias.get_value())).astype(x.dtype)


def divide_by_rms(x: Float[Array, "... d"], epsilon: float) -> Float[Array, "... d"]:
    """Divide by the root mean square over the last dimension, in the dtype of x; epsilon is added to the mean."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + epsilon)
