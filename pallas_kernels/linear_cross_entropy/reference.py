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
    kept = weight != 0
    logits = jnp.where(kept[:, None], hidden, 0) @ head[:vocabulary].T
    if soft_cap is not None:
        logits = soft_cap * jnp.tanh(logits / soft_cap)
    lse = jax.nn.logsumexp(logits, axis=-1)
    wanted = jax.nn.one_hot(jnp.where(kept, targets, 0), vocabulary, dtype=logits.dtype)
    wanted = (1 - label_smoothing) * wanted + label_smoothing / vocabulary
    return weight * (lse - jnp.sum(wanted * logits, axis=-1) + z_loss * lse**2)
