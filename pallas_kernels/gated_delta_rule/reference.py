"""The gated delta rule token by token, in plain jnp: the reference of every backend."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def gated_delta_rule(
    q: Float[Array, "b s hk dk"],
    k: Float[Array, "b s hk dk"],
    v: Float[Array, "b s hv dv"],
    log_decay: Float[Array, "b s hv"],
    beta: Float[Array, "b s hv"],
    starts: Bool[Array, "b s"],
    state: Float[Array, "b hv dk dv"],
    scale: float,
) -> tuple[Float[Array, "b s hv dv"], Float[Array, "b hv dk dv"]]:
    """Return outputs in the dtype of v, and the last state; computed in the dtype of the state.

    This is the recurrence of `torch_recurrent_gated_delta_rule` in transformers (models/qwen3_next).
    """

    def token(state: Array, inputs: tuple[Array, ...]) -> tuple[Array, Array]:
        q, k, v, log_decay, beta, start = inputs
        decay = jnp.where(start[:, None], 0, jnp.exp(log_decay))
        state = state * decay[:, :, None, None]
        missing = v - jnp.einsum("bhkv,bhk->bhv", state, k, precision="highest")
        state = state + jnp.einsum("bhk,bhv->bhkv", k, missing * beta[:, :, None], precision="highest")
        return state, jnp.einsum("bhkv,bhk->bhv", state, q, precision="highest") * scale

    group = v.shape[2] // k.shape[2]
    arrays = (jnp.repeat(q, group, axis=2), jnp.repeat(k, group, axis=2), v, log_decay, beta)
    by_token = tuple(jnp.moveaxis(x, 1, 0) for x in (*(x.astype(state.dtype) for x in arrays), starts))
    state, out = jax.lax.scan(token, state, by_token)
    return jnp.moveaxis(out, 0, 1).astype(v.dtype), state
