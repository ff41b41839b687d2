"""The same loss with all logits in memory, in the precision of its inputs: the reference of every backend."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def linear_cross_entropy(
    hidden: Float[Array, "t d"],
    head: Float[Array, "v d"],
    targets: Int[Array, " t"],
    weight: Float[Array, " t"],
    *,
    vocabulary: int,
    soft_cap: float | None = None,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
) -> Float[Array, " t"]:
    """Return the loss of every token; arguments as in the op."""
    has_weight = weight != 0
    logits = jnp.where(has_weight[:, None], hidden, 0) @ head[:vocabulary].T
    if soft_cap is not None:
        logits = soft_cap * jnp.tanh(logits / soft_cap)
    lse = jax.nn.logsumexp(logits, axis=-1)
    target_probability = jax.nn.one_hot(jnp.where(has_weight, targets, 0), vocabulary, dtype=logits.dtype)
    target_probability = (1 - label_smoothing) * target_probability + label_smoothing / vocabulary
    return weight * (lse - jnp.sum(target_probability * logits, axis=-1) + z_loss * lse**2)
