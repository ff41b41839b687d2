"""The same loss with all logits in memory: what every backend is compared with."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def linear_cross_entropy(
    hidden: Float[Array, "t d"], head: Float[Array, "v d"], targets: Int[Array, " t"], vocabulary: int
) -> Float[Array, " t"]:
    """-log softmax(hidden head^T)[target] per token in float32; rows of the head past `vocabulary` are padding."""
    logits = jnp.dot(hidden, head[:vocabulary].T, preferred_element_type=jnp.float32)
    return jax.nn.logsumexp(logits, axis=-1) - jnp.take_along_axis(logits, targets[:, None], axis=-1)[:, 0]
