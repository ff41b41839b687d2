"""Root-mean-square normalisation (Zhang & Sennrich 2019)."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxtune.models.declared import declared


class RMSNorm(nnx.Module):
    """x / rms(x) * weight over the last dimension, computed in float32, returned in the dtype of x."""

    def __init__(self, size: int, epsilon: float):
        self.weight = declared((size,), (None,), nnx.initializers.ones, "vector")
        self.epsilon = epsilon

    def __call__(self, x: Float[Array, "... d"]) -> Float[Array, "... d"]:
        """Normalised x; as in transformers it is rounded to its dtype before the weight multiplies it.

        They are multiplied in float32, so that the weight's gradient is summed over the tokens in float32.
        """
        wide = x.astype(jnp.float32)
        normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.epsilon)
        rounded, weight = (value.astype(x.dtype).astype(jnp.float32) for value in (normed, self.weight))
        return (rounded * weight).astype(x.dtype)
