"""The gated delta rule in plain XLA, chunk by chunk, on any device.

Shapes: b batch, s sequence, h heads, hk key heads, hv value heads, dk and dv head sizes, c tokens of a chunk.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from pallas_kernels.chunks import CHUNK, decays, sum_decays, whole_chunks


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

    The residuals are the inputs and the state before each chunk; the backward pass recomputes a chunk.
    """
    group = v.shape[2] // k.shape[2]

    @jax.checkpoint
    def chunk(state: Array, inputs: tuple[Array, ...]) -> tuple[Array, Array]:
        *arrays, starts = inputs
        q, k, v, log_decay, beta = (x.astype(state.dtype) for x in arrays)
        # Repeated inside the checkpoint, so that a residual has only the key heads.
        q, k = (jnp.repeat(x, group, axis=1) for x in (q * scale, k))
        state, out = _chunk(q, k, v, log_decay, beta, starts, state)
        return state, out.astype(inputs[2].dtype)

    # Documents are the same for all heads: `starts` gets a head axis of one, which broadcasts.
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
    """Return the state after a chunk, and the chunk's outputs.

    A token adds the outer product of k and `written` to the state, where written = beta (v - the state's value for k).
    That value comes from the state before the chunk and from the values that earlier tokens of the document wrote, both
    decayed. So the written values of all tokens of the chunk are the solution of a triangular system (Yang et al. 2024,
    arXiv:2412.06464, section 3.3).
    """
    between, carried = decays(*sum_decays(log_decay, starts))
    held = carried[..., None] * _product("bhik,bhkv->bhiv", k, state)
    overlap = beta[..., None] * between * _product("bhik,bhjk->bhij", k, k)
    written = _product("bhij,bhjv->bhiv", _unit_lower_inverse(overlap), beta[..., None] * (v - held))
    # An output reads the state before the chunk, and the values that tokens of the chunk wrote up to its own.
    out = carried[..., None] * _product("bhik,bhkv->bhiv", q, state)
    out += _product("bhij,bhjv->bhiv", between * _product("bhik,bhjk->bhij", q, k), written)
    state = carried[..., -1, None, None] * state
    return state + _product("bhik,bhiv->bhkv", between[..., -1, :, None] * k, written), out


def _unit_lower_inverse(matrix: Float[Array, "b h c c"]) -> Float[Array, "b h c c"]:
    """Invert the unit lower triangular matrix whose elements below the diagonal are those given; others are ignored.

    Each round doubles the size of the inverted blocks: the inverse of [[A, 0], [C, B]] is [[A', 0], [-B' C A', B']],
    with A' and B' the inverses of A and B. A triangular solve is not used, because on a CPU with more devices than
    cores XLA's solve waits forever for other devices.
    """
    size = matrix.shape[-1]
    # Blocks of one element: the diagonal is 1, and so is its inverse.
    inverse = jnp.ones((*matrix.shape[:2], size, 1, 1), matrix.dtype)
    inverse += 0 * matrix[..., :1, :1, None]  # so that it varies over the same mesh axes as the matrix
    for half in (2**n for n in range(size.bit_length() - 1)):
        # Only the diagonal blocks of twice the size are used: they are [[A, 0], [C, B]], and C is new in this round.
        in_blocks = matrix.reshape(*matrix.shape[:2], size // half // 2, 2 * half, -1, 2 * half)
        diagonal = jnp.moveaxis(jnp.diagonal(in_blocks, axis1=2, axis2=4), -1, 2)
        a, b, c = inverse[:, :, ::2], inverse[:, :, 1::2], diagonal[..., half:, :half]
        below = -_product("bhnij,bhnjk->bhnik", _product("bhnij,bhnjk->bhnik", b, c), a)
        upper = jnp.concatenate([a, jnp.zeros_like(a)], axis=-1)
        inverse = jnp.concatenate([upper, jnp.concatenate([below, b], axis=-1)], axis=-2)
    return inverse[:, :, 0]


def _product(subscripts: str, a: Array, b: Array) -> Array:
    # No TF32 on a GPU: errors in the inverse and the state would carry over to all later chunks.
    return jnp.einsum(subscripts, a, b, precision="highest")


def _by_chunk(x: Array) -> Array:
    """Reshape (b, h, s, ...) to (chunks, b, h, chunk, ...)."""
    return jnp.moveaxis(whole_chunks(x, 2).reshape(*x.shape[:2], -1, CHUNK, *x.shape[3:]), 2, 0)
