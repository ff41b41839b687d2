"""The gated delta rule by XLA alone, a chunk of tokens after another, on any device."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from pallas_kernels.gated_delta_rule.chunks import CHUNK, decays, summed, whole_chunks


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
    """Outputs in the dtype of v, and the last state; computed in the dtype of the state.

    The backward pass keeps the inputs and the state before each chunk, and computes a chunk again.
    """
    group = v.shape[2] // k.shape[2]

    @jax.checkpoint
    def chunk(state: Array, given: tuple[Array, ...]) -> tuple[Array, Array]:
        *arrays, starts = given
        q, k, v, log_decay, beta = (x.astype(state.dtype) for x in arrays)
        q, k = (jnp.repeat(x, group, axis=1) for x in (q * scale, k))
        state, out = _chunk(q, k, v, log_decay, beta, starts, state)
        return state, out.astype(given[2].dtype)

    by_head = (x.swapaxes(1, 2) for x in (q, k, v, log_decay, beta, starts[..., None]))
    state, out = jax.lax.scan(chunk, state, tuple(map(_by_chunk, by_head)))
    out = jnp.moveaxis(out, 0, 2).reshape(*out.shape[1:3], -1, out.shape[-1])
    return out[:, :, : v.shape[1]].swapaxes(1, 2), state


def _chunk(
    q: Float[Array, "b h c dk"],
    k: Float[Array, "b h c dk"],
    v: Float[Array, "b h c dv"],
    log_decay: Float[Array, "b h c"],
    beta: Float[Array, "b h c"],
    starts: Bool[Array, "b 1 c"],
    state: Float[Array, "b h dk dv"],
) -> tuple[Float[Array, "b h dk dv"], Float[Array, "b h c dv"]]:
    """The state after a chunk, and its outputs.

    A token adds k (outer) written to the state, where written = beta (v - what the state held for k). What it held is
    the state before the chunk and what earlier tokens of the document wrote, both decayed: a triangular system of
    equations for what all tokens of the chunk write (Yang et al. 2024, arXiv:2412.06464, section 3.3).
    """
    between, carried = decays(*summed(log_decay, starts))
    held = carried[..., None] * _product("bhik,bhkv->bhiv", k, state)
    overlap = beta[..., None] * between * _product("bhik,bhjk->bhij", k, k)
    written = _product("bhij,bhjv->bhiv", _unit_lower_inverse(overlap), beta[..., None] * (v - held))
    out = carried[..., None] * _product("bhik,bhkv->bhiv", q, state)
    out += _product("bhij,bhjv->bhiv", between * _product("bhik,bhjk->bhij", q, k), written)
    state = carried[..., -1, None, None] * state
    return state + _product("bhik,bhiv->bhkv", between[..., -1, :, None] * k, written), out


def _unit_lower_inverse(matrix: Float[Array, "b h c c"]) -> Float[Array, "b h c c"]:
    """The inverse of a lower triangular matrix with ones on its diagonal, whatever is on it and above.

    Of blocks of twice the size at a time: that of [[A, 0], [C, B]] is [[A', 0], [-B' C A', B']]. Not a triangular
    solve: on a CPU with more devices than cores XLA's waits forever for those of other devices.
    """
    size = matrix.shape[-1]
    inverse = jnp.ones((*matrix.shape[:2], size, 1, 1), matrix.dtype)
    inverse += 0 * matrix[..., :1, :1, None]  # varies over the mesh as the matrix does
    for half in (2**n for n in range(size.bit_length() - 1)):
        in_blocks = matrix.reshape(*matrix.shape[:2], size // half // 2, 2 * half, -1, 2 * half)
        diagonal = jnp.moveaxis(jnp.diagonal(in_blocks, axis1=2, axis2=4), -1, 2)
        a, b, c = inverse[:, :, ::2], inverse[:, :, 1::2], diagonal[..., half:, :half]
        below = -_product("bhnij,bhnjk->bhnik", _product("bhnij,bhnjk->bhnik", b, c), a)
        upper = jnp.concatenate([a, jnp.zeros_like(a)], axis=-1)
        inverse = jnp.concatenate([upper, jnp.concatenate([below, b], axis=-1)], axis=-2)
    return inverse[:, :, 0]


def _product(subscripts: str, a: Array, b: Array) -> Array:
    return jnp.einsum(subscripts, a, b, precision="highest")


def _by_chunk(x: Array) -> Array:
    """(b, h, s, ...) as (chunks, b, h, chunk, ...)."""
    return jnp.moveaxis(whole_chunks(x, 2).reshape(*x.shape[:2], -1, CHUNK, *x.shape[3:]), 2, 0)
