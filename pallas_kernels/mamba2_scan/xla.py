"""Mamba-2 in plain XLA, chunk by chunk (Dao & Gu 2024, arXiv:2405.21060, section 6), on any device.

Shapes: b batch, s sequence, g groups of r heads, p features of a head, n features of the state, c tokens of a chunk.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from pallas_kernels.chunks import CHUNK, decays, sum_decays, whole_chunks

_product = partial(jnp.einsum, precision="highest")  # no TF32 on a GPU: errors in the state would carry over


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
    """Return outputs in the dtype of x, and the last state; computed in the dtype of the state.

    The residuals are the inputs and the state before each chunk; the backward pass recomputes a chunk.
    """
    groups, length, dtype = write.shape[2], x.shape[1], state.dtype
    by_group = (groups, x.shape[2] // groups)
    rate, skip = (array.reshape(*by_group, 1) for array in (rate, skip))

    @jax.checkpoint
    def chunk(state: Array, inputs: tuple[Array, ...]) -> tuple[Array, Array]:
        *arrays, starts = inputs
        x, step, write, read = (array.astype(dtype) for array in arrays)
        between, carried = decays(*sum_decays(rate * step, starts))
        written = step[..., None] * x
        # Inside the chunk this is attention with scores that decay; what is older is in the state.
        scores = between * _product("bgin,bgjn->bgij", read, write)[:, :, None]
        out = _product("bgrij,bgrjp->bgrip", scores, written)
        out += carried[..., None] * _product("bgin,bgrpn->bgrip", read, state)
        out += skip[..., None] * x
        written = _product("bgrjp,bgjn->bgrpn", between[..., -1, :, None] * written, write)
        return carried[..., -1, None, None] * state + written, out.astype(arrays[0].dtype)

    def by_chunk(array: Float[Array, "b s ..."], heads: tuple[int, ...]) -> Float[Array, "chunks b ..."]:
        """Cut positions into chunks; `heads`: sizes of the head axes, which go before the positions of a chunk."""
        cut = whole_chunks(array, 1)
        cut = cut.reshape(len(cut), -1, CHUNK, *heads, *array.shape[3:])
        return jnp.moveaxis(jnp.moveaxis(cut, 1, 0), 2, 2 + len(heads))

    arrays = [by_chunk(array, by_group) for array in (x, step)]
    arrays += [by_chunk(array, (groups,)) for array in (write, read)]
    # Documents are the same for all heads: `starts` has head axes of one, which broadcast.
    arrays.append(by_chunk(starts[..., None], (1, 1)))
    last, out = jax.lax.scan(chunk, state.reshape(len(x), *by_group, *state.shape[2:]), tuple(arrays))
    out = jnp.moveaxis(jnp.moveaxis(out, 4, 2), 0, 1)  # (b, chunks, c, g, r, p)
    return out.reshape(len(x), -1, *x.shape[2:])[:, :length], last.reshape(state.shape)
