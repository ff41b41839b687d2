"""Mamba-2 token by token, in plain jnp: the reference of every backend, and the backend for a single token."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def mamba2_scan(
    x: Float[Array, "b s h p"],
    step: Float[Array, "b s h"],
    rate: Float[Array, " h"],
    write: Float[Array, "b s g n"],
    read: Float[Array, "b s g n"],
    skip: Float[Array, " h"],
    starts: Bool[Array, "b s"],
    state: Float[Array, "b h p n"],
) -> tuple[Float[Array, "b s h p"], Float[Array, "b h p n"]]:
    """Return outputs in the dtype of x, and the last state; computed in the dtype of the state."""

    def token(state: Array, inputs: tuple[Array, ...]) -> tuple[Array, Array]:
        *arrays, start = inputs
        x, step, write, read = (array.astype(state.dtype) for array in arrays)
        write, read = (jnp.repeat(array, x.shape[1] // array.shape[1], axis=1) for array in (write, read))
        decay = jnp.where(start[:, None], 0, jnp.exp(rate * step))
        state = decay[..., None, None] * state + (step[..., None] * x)[..., None] * write[:, :, None]
        out = jnp.einsum("bhpn,bhn->bhp", state, read, precision="highest") + skip[:, None] * x
        return state, out.astype(arrays[0].dtype)

    by_token = tuple(jnp.moveaxis(array, 1, 0) for array in (x, step, write, read, starts))
    state, out = jax.lax.scan(token, state, by_token)
    return jnp.moveaxis(out, 0, 1), state
