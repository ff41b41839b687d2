"""The bodies of the four kernels of triton.py. A chunk's arrays are (tokens, ...); d_x is the gradient of x.

A program of the last three kernels computes `tokens` tokens of a chunk, for some heads of a group, which share the
products of `read` and `write`. Its own tokens read what all tokens of the chunk write, or the other way round.

Names in the code:
- scores: `read` times `write`, decayed, and times the step: what a token reads of what another wrote
- carried, to_end, through: decay factors, see `in_chunks.ends`

Products are computed in the inputs' dtype.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool

from pallas_kernels.chunks import CHUNK
from pallas_kernels.in_chunks import dot, ends, rows_of
from pallas_kernels.triton_call import plgpu


def carry(values_ref, keys_ref, total_ref, begun_ref, step_ref, first_ref, states_ref, last_ref, *, columns, backward):
    """Carry some columns of a head's state through all chunks; store it before each chunk, and at the end.

    Backward it is the gradient of the state, from the last chunk to the first: the values are the gradients of the
    outputs, and the keys are `read`.
    """
    # Columns of a state do not depend on each other.
    column = pl.ds(pl.program_id(0) * columns, columns)
    chunks = states_ref.shape[0]

    def chunk(done, state):
        n = chunks - 1 - done if backward else done
        rows = rows_of(n)
        # The carried state stays float32. Only this 16-bit copy is multiplied.
        plgpu.store(states_ref.at[n, :, column], state.astype(states_ref.dtype))
        values, keys = plgpu.load(values_ref.at[rows]), plgpu.load(keys_ref.at[rows, column])
        carried, to_end, through = ends(total_ref, begun_ref, n)
        factor = carried if backward else to_end * plgpu.load(step_ref.at[rows])
        return through * state + dot((factor[:, None] * values).astype(values.dtype).T, keys)

    state = jax.lax.fori_loop(0, chunks, chunk, plgpu.load(first_ref.at[:, column]))
    plgpu.store(last_ref.at[:, column], state)


def outputs(
    x_ref, write_ref, read_ref, states_ref, total_ref, begun_ref, step_ref, skip_ref, out_ref, *, heads, tokens
):
    """Compute the outputs."""
    n, rows, own = _places(tokens)
    visible = _same_document(begun_ref, own, rows) & (_distance(tokens) >= 0)
    products = dot(plgpu.load(read_ref.at[own]), plgpu.load(write_ref.at[rows]).T)

    def head(i, _):
        total, step = (plgpu.load(ref.at[i, rows]) for ref in (total_ref, step_ref))
        own_total = plgpu.load(total_ref.at[i, own])
        between = jnp.exp(jnp.where(visible, own_total[:, None] - total, -jnp.inf))
        x = plgpu.load(x_ref.at[rows, i])
        out = dot((between * step * products).astype(x.dtype), x)
        carried, *_ = ends(total_ref, begun_ref, n, (i,), own)
        # Loaded for each head, because registers do not hold them through the loop.
        read, own_x = plgpu.load(read_ref.at[own]), plgpu.load(x_ref.at[own, i])
        out += carried[:, None] * dot(read, plgpu.load(states_ref.at[i, n]).T)
        out += plgpu.load(skip_ref.at[i]) * own_x
        plgpu.store(out_ref.at[own, i], out.astype(out_ref.dtype))
        return ()

    jax.lax.fori_loop(0, heads, head, ())


def readers(
    x_ref,
    write_ref,
    read_ref,
    d_out_ref,
    states_ref,
    total_ref,
    begun_ref,
    step_ref,
    d_read_ref,
    d_between_ref,
    d_carried_ref,
    *,
    heads,
    tokens,
):
    """Compute the gradients of `read`, summed over the heads, and of the logarithms of decays up to a reading token.

    d_between is for decays since other tokens of the chunk, d_carried for the decay since the chunk began.
    """
    n, rows, own = _places(tokens)
    visible = _same_document(begun_ref, own, rows) & (_distance(tokens) >= 0)
    products = dot(plgpu.load(read_ref.at[own]), plgpu.load(write_ref.at[rows]).T)

    # The gradient of a decay's logarithm is the gradient of the decay times the decay.
    def pairs(i, d_products):
        total, step = (plgpu.load(ref.at[i, rows]) for ref in (total_ref, step_ref))
        own_total = plgpu.load(total_ref.at[i, own])
        between = jnp.exp(jnp.where(visible, own_total[:, None] - total, -jnp.inf))
        d_decayed = between * step * dot(plgpu.load(d_out_ref.at[own, i]), plgpu.load(x_ref.at[rows, i]).T)
        plgpu.store(d_between_ref.at[i, own], jnp.sum(products * d_decayed, axis=1))
        return d_products + d_decayed

    d_products = jax.lax.fori_loop(0, heads, pairs, jnp.zeros((tokens, CHUNK), jnp.float32))

    # A second loop, because registers do not hold what both loops need.
    def states(i, d_read):
        carried, *_ = ends(total_ref, begun_ref, n, (i,), own)
        d_out = plgpu.load(d_out_ref.at[own, i])
        held = dot((carried[:, None] * d_out).astype(d_out.dtype), plgpu.load(states_ref.at[i, n]))
        plgpu.store(d_carried_ref.at[i, own], jnp.sum(plgpu.load(read_ref.at[own]) * held, axis=1))
        return d_read + held

    d_read = jax.lax.fori_loop(0, heads, states, dot(d_products, plgpu.load(write_ref.at[rows])))
    plgpu.store(d_read_ref.at[own], d_read.astype(d_read_ref.dtype))


def writers(
    x_ref,
    write_ref,
    read_ref,
    d_out_ref,
    states_ref,
    d_states_ref,
    total_ref,
    begun_ref,
    step_ref,
    skip_ref,
    dx_ref,
    d_write_ref,
    d_step_ref,
    d_to_end_ref,
    d_skip_ref,
    d_through_ref,
    *,
    heads,
    tokens,
):
    """Compute the gradients of x, of `write`, summed over the heads, and parts of the other gradients.

    d_step is the gradient of the step without d_to_end, its part by the state after the chunk.
    """
    n, rows, own = _places(tokens)
    block, distance = pl.program_id(0), _distance(tokens)
    visible = _same_document(begun_ref, own, rows) & (distance <= 0)

    def load_products():
        return dot(plgpu.load(write_ref.at[own]), plgpu.load(read_ref.at[rows]).T)

    def load_between(i):
        total, own_total = (plgpu.load(total_ref.at[i, some]) for some in (rows, own))
        return jnp.exp(jnp.where(visible, total - own_total[:, None], -jnp.inf))

    products = load_products()

    def pairs(i, d_products):
        d_scores = dot(plgpu.load(x_ref.at[own, i]), plgpu.load(d_out_ref.at[rows, i]).T)
        d_skip = jnp.sum(jnp.sum(jnp.where(distance == 0, d_scores, 0.0), axis=1))
        plgpu.store(d_skip_ref.at[i, block], d_skip)
        d_decayed = load_between(i) * d_scores
        plgpu.store(d_step_ref.at[i, own], jnp.sum(products * d_decayed, axis=1))
        return d_products + plgpu.load(step_ref.at[i, own])[:, None] * d_decayed

    d_products = jax.lax.fori_loop(0, heads, pairs, jnp.zeros((tokens, CHUNK), jnp.float32))
    d_write = dot(d_products, plgpu.load(read_ref.at[rows]))
    # The rows of a state that this program multiplies by the rows of its gradient.
    size = x_ref.shape[2] * tokens // CHUNK
    some = pl.ds(block % (CHUNK // tokens) * size, size)

    # Three loops, and products computed again, because registers do not hold what the loops need together.
    def states(i, d_write):
        _, to_end, through = ends(total_ref, begun_ref, n, (i,), own)
        factor = to_end * plgpu.load(step_ref.at[i, own])
        x, d_state = plgpu.load(x_ref.at[own, i]), plgpu.load(d_states_ref.at[i, n])
        state, d_same = (plgpu.load(ref.at[i, n, some]) for ref in (states_ref, d_states_ref))
        d_through = jnp.sum(jnp.sum(state.astype(jnp.float32) * d_same, axis=1))
        plgpu.store(d_through_ref.at[i, block], through * d_through)
        return d_write + dot((factor[:, None] * x).astype(x.dtype), d_state)

    d_write = jax.lax.fori_loop(0, heads, states, d_write)
    plgpu.store(d_write_ref.at[own], d_write.astype(d_write_ref.dtype))
    products_again = load_products()

    def values(i, _):
        dx = dot((load_between(i) * products_again).astype(x_ref.dtype), plgpu.load(d_out_ref.at[rows, i]))
        # The gradient of the state after the chunk, read by what each token wrote.
        d_written = dot(plgpu.load(write_ref.at[own]), plgpu.load(d_states_ref.at[i, n]).T)
        _, to_end, _ = ends(total_ref, begun_ref, n, (i,), own)
        d_written = to_end[:, None] * d_written
        plgpu.store(d_to_end_ref.at[i, own], jnp.sum(plgpu.load(x_ref.at[own, i]) * d_written, axis=1))
        dx = plgpu.load(step_ref.at[i, own])[:, None] * (dx + d_written)
        dx += plgpu.load(skip_ref.at[i]) * plgpu.load(d_out_ref.at[own, i])
        plgpu.store(dx_ref.at[own, i], dx.astype(dx_ref.dtype))
        return ()

    jax.lax.fori_loop(0, heads, values, ())


def _places(tokens: int) -> tuple[Array, pl.Slice, pl.Slice]:
    """Return the chunk of a program, all tokens of the chunk, and the program's own tokens."""
    n = pl.program_id(0) * tokens // CHUNK
    return n, rows_of(n), pl.Slice(pl.program_id(0) * tokens, tokens)


def _distance(tokens: int) -> Array:
    """Return the position of each own token minus that of each token of the chunk: (own tokens, tokens)."""
    own, other = (jax.lax.broadcasted_iota(jnp.int32, (tokens, CHUNK), axis) for axis in (0, 1))
    return pl.program_id(0) * tokens % CHUNK + own - other


def _same_document(begun_ref, own: pl.Slice, rows: pl.Slice) -> Bool[Array, "own c"]:
    return plgpu.load(begun_ref.at[own])[:, None] == plgpu.load(begun_ref.at[rows])
