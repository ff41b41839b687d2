"""The bodies of the five kernels of triton.py. A chunk's arrays are (tokens, ...); d_x is the gradient of x.

Names in the code:
- held: the value that the state before the chunk holds for k
- missing: v - held
- written: `inverse` times beta * missing, the values that the tokens of the chunk write to the state
- the outputs are `attention` times written, plus q times the state before the chunk
- carried, to_end, through: decay factors, see `in_chunks.ends`

Products are computed in the inputs' dtype.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from pallas_kernels.chunks import CHUNK, decays
from pallas_kernels.in_chunks import dot, ends, pair, rows_of
from pallas_kernels.triton_call import plgpu

# Size of the blocks that are inverted by elimination. With quarters, the products that join them spill on sm_80.
HALF = CHUNK // 2


def within(q_ref, k_ref, total_ref, begun_ref, beta_ref, inverse_ref, attention_ref, *, scale, columns):
    """Compute the inverse and the attention of a chunk, both (tokens, tokens)."""
    rows = rows_of(pl.program_id(0))

    # Both products contract over the features and share each load of k.
    def block(j, products):
        q, k = (plgpu.load(ref.at[rows, pl.ds(j * columns, columns)]) for ref in (q_ref, k_ref))
        return products[0] + dot(q, k.T), products[1] + dot(k, k.T)

    zeros = jnp.zeros((CHUNK, CHUNK), jnp.float32)
    qk, kk = jax.lax.fori_loop(0, q_ref.shape[1] // columns, block, (zeros, zeros))
    between, _ = decays(plgpu.load(total_ref.at[rows]), plgpu.load(begun_ref.at[rows]))
    plgpu.store(attention_ref.at[rows], (scale * between * qk).astype(attention_ref.dtype))
    # The system that the written values solve: one plus `overlap`, which is strictly lower triangular.
    row, column = pair()
    overlap = jnp.where(row > column, plgpu.load(beta_ref.at[rows])[:, None] * between * kk, 0.0)
    plgpu.store(inverse_ref.at[rows], _inverse(overlap).astype(inverse_ref.dtype))


def forward(
    q_ref,
    k_ref,
    v_ref,
    inverse_ref,
    attention_ref,
    total_ref,
    begun_ref,
    beta_ref,
    state_ref,
    out_ref,
    last_ref,
    states_ref,
    *,
    scale,
    columns,
):
    """Compute some columns of the state before each chunk, of the outputs, and of the last state."""
    # Columns of a state do not depend on each other, so a program carries some of them through all chunks.
    column = pl.ds(pl.program_id(0) * columns, columns)

    def chunk(n, state):
        rows = rows_of(n)
        q, k, beta = (plgpu.load(ref.at[rows]) for ref in (q_ref, k_ref, beta_ref))
        inverse, attention = (plgpu.load(ref.at[rows]) for ref in (inverse_ref, attention_ref))
        carried, to_end, through = ends(total_ref, begun_ref, n)
        # The carried state stays float32. Only this 16-bit copy is multiplied and saved, so the backward pass sees the
        # same numbers.
        before = state.astype(q.dtype)
        plgpu.store(states_ref.at[n, :, column], before)
        held = carried[:, None] * dot(k, before)
        # A float32 difference: v and what the state holds for k become nearly equal as the state learns.
        missing = plgpu.load(v_ref.at[rows, column]).astype(jnp.float32) - held
        written = dot(inverse, beta[:, None] * missing)
        # `attention` includes the scale and the decays already (see `within`); the state's part needs both here.
        out = (scale * carried)[:, None] * dot(q, before) + dot(attention, written)
        plgpu.store(out_ref.at[rows, column], out.astype(out_ref.dtype))
        return through * state + dot(k.T, to_end[:, None] * written)

    chunks = states_ref.shape[0]
    state = jax.lax.fori_loop(0, chunks, chunk, plgpu.load(state_ref.at[:, column]))
    plgpu.store(last_ref.at[:, column], state)


def backward(
    q_ref,
    k_ref,
    d_out_ref,
    inverse_ref,
    attention_ref,
    total_ref,
    begun_ref,
    beta_ref,
    d_last_ref,
    d_states_ref,
    d_missing_ref,
    d_state_ref,
    *,
    scale,
    columns,
):
    """Compute some columns of d_state after each chunk and before the first, and of d_missing.

    d_missing is the gradient of beta * missing.
    """
    column = pl.ds(pl.program_id(0) * columns, columns)
    chunks = d_states_ref.shape[0]

    def chunk(done, d_state):
        # d_state is the gradient of the state after chunk n, so chunks run from the last to the first.
        n = chunks - 1 - done
        rows = rows_of(n)
        q, k, beta = (plgpu.load(ref.at[rows]) for ref in (q_ref, k_ref, beta_ref))
        inverse, attention = (plgpu.load(ref.at[rows]) for ref in (inverse_ref, attention_ref))
        d_out = plgpu.load(d_out_ref.at[rows, column])
        carried, to_end, through = ends(total_ref, begun_ref, n)
        after = d_state.astype(q.dtype)
        plgpu.store(d_states_ref.at[n, :, column], after)
        # Two uses of written: the chunk's outputs read it, and so does the state at the chunk's end.
        d_written = dot(attention.T, d_out) + to_end[:, None] * dot(k, after)
        d_missing = dot(inverse.T, d_written)  # gradient of beta * missing, the operand of the inverse
        plgpu.store(d_missing_ref.at[rows, column], d_missing.astype(d_missing_ref.dtype))
        d_held = (beta * carried)[:, None] * d_missing
        # Three uses of the state before the chunk: the state after it, the queries, and `held`, which is subtracted.
        return through * d_state + dot(q.T, (scale * carried)[:, None] * d_out) - dot(k.T, d_held)

    d_state = jax.lax.fori_loop(0, chunks, chunk, plgpu.load(d_last_ref.at[:, column]))
    plgpu.store(d_state_ref.at[:, column], d_state)


def pairs(
    k_ref,
    v_ref,
    d_out_ref,
    inverse_ref,
    attention_ref,
    states_ref,
    d_missing_ref,
    total_ref,
    begun_ref,
    beta_ref,
    written_ref,
    d_qk_ref,
    d_kk_ref,
    d_total_ref,
    d_beta_ref,
    *,
    scale,
    columns,
):
    """Compute written, the gradients of q k^T, of k k^T (plus its transpose) and of beta, and a part of d_total."""
    n = pl.program_id(0)
    rows = rows_of(n)
    k, beta = (plgpu.load(ref.at[rows]) for ref in (k_ref, beta_ref))
    carried, *_ = ends(total_ref, begun_ref, n)

    def block(j, sums):
        d_attention, d_overlap, d_beta, d_held = sums
        column = pl.ds(j * columns, columns)
        v, d_out, d_missing = (plgpu.load(ref.at[rows, column]) for ref in (v_ref, d_out_ref, d_missing_ref))
        held = carried[:, None] * dot(k, plgpu.load(states_ref.at[n, :, column]))
        missing = v.astype(jnp.float32) - held
        # The same product as in `forward`, which saves only the states.
        written = dot(plgpu.load(inverse_ref.at[rows]), beta[:, None] * missing).astype(k.dtype)
        plgpu.store(written_ref.at[rows, column], written)
        d_attention += dot(d_out, written.T)
        # written = (1 + overlap)^-1 x with x = beta * missing, so d_overlap = -d_x written^T.
        d_overlap -= dot(d_missing, written.T)
        d_beta += jnp.sum(d_missing * missing, axis=1)
        # held is a multiple of exp(total), so its gradient times held itself is the gradient of total.
        d_held -= jnp.sum(d_missing * held, axis=1)
        return d_attention, d_overlap, d_beta, d_held

    square, narrow = (jnp.zeros(shape, jnp.float32) for shape in ((CHUNK, CHUNK), (CHUNK,)))
    sums = jax.lax.fori_loop(0, v_ref.shape[1] // columns, block, (square, square, narrow, narrow))
    d_attention, d_overlap, d_beta, d_held = sums

    row, column = pair()
    between, _ = decays(plgpu.load(total_ref.at[rows]), plgpu.load(begun_ref.at[rows]))
    d_qk = scale * between * d_attention
    plgpu.store(d_qk_ref.at[rows], d_qk.astype(d_qk_ref.dtype))
    # d_overlap is a full matrix, but only elements below the diagonal are in the system.
    below = jnp.where(row > column, between * d_overlap, 0.0)
    overlap = below * dot(k, k.T)
    d_kk = beta[:, None] * below
    # k is on both sides of k k^T. With the transpose added, `heads` gets this part of dk by a single product.
    plgpu.store(d_kk_ref.at[rows], (d_kk + d_kk.T).astype(d_kk_ref.dtype))
    plgpu.store(d_beta_ref.at[rows], d_beta + jnp.sum(overlap, axis=1))
    # Gradients of the log-decays: between two tokens (d_between), and of the state before the chunk in `held`.
    d_between = d_attention * plgpu.load(attention_ref.at[rows]) + beta[:, None] * overlap
    # A log-decay between two tokens is total[token] - total[other], so rows add to the gradient and columns subtract.
    d_total = jnp.sum(d_between, axis=1) - jnp.sum(d_between, axis=0) + beta * d_held
    plgpu.store(d_total_ref.at[rows], d_total)


def heads(
    q_ref,
    k_ref,
    d_out_ref,
    written_ref,
    states_ref,
    d_states_ref,
    d_missing_ref,
    d_qk_ref,
    d_kk_ref,
    total_ref,
    begun_ref,
    beta_ref,
    dq_ref,
    dk_ref,
    d_total_ref,
    *,
    scale,
    columns,
):
    """Compute the gradients of q and k of a chunk, and the other part of d_total."""
    n = pl.program_id(0)
    rows = rows_of(n)
    carried, to_end, through = ends(total_ref, begun_ref, n)
    beta = plgpu.load(beta_ref.at[rows])

    def block(j, sums):
        dq, dk, d_held, d_through = sums
        column = pl.ds(j * columns, columns)
        state, d_state = (plgpu.load(ref.at[n, :, column]) for ref in (states_ref, d_states_ref))
        d_out, written, d_missing = (
            plgpu.load(ref.at[rows, column]) for ref in (d_out_ref, written_ref, d_missing_ref)
        )
        dq += dot(d_out, state.T)
        dk += dot(written, d_state.T)
        d_held += dot(d_missing, state.T)
        d_through += jnp.sum(state.astype(jnp.float32) * d_state, axis=1)
        return dq, dk, d_held, d_through

    wide = jnp.zeros((CHUNK, q_ref.shape[1]), jnp.float32)
    sums = wide, wide, wide, jnp.zeros(q_ref.shape[1], jnp.float32)
    dq, dk, d_held, d_through = jax.lax.fori_loop(0, d_out_ref.shape[1] // columns, block, sums)
    q, k = (plgpu.load(ref.at[rows]) for ref in (q_ref, k_ref))
    # Row factors are the same for all columns of the state, so they multiply the sums once.
    dq = (scale * carried)[:, None] * dq
    dk = to_end[:, None] * dk
    # Until here dq and dk have only the parts through the states. Their dot products with q and k are thus the
    # gradients of log(carried) and log(to_end); the decays between tokens were in `pairs`.
    d_to_end = jnp.sum(k * dk, axis=1)
    # to_end and through depend on the chunk's last summed decay, so its gradient collects all of theirs.
    at_end = jnp.sum(d_to_end) + through * jnp.sum(d_through)
    d_total = jnp.sum(q * dq, axis=1) - d_to_end + jnp.where(jnp.arange(CHUNK) == CHUNK - 1, at_end, 0.0)
    d_qk, d_kk = (plgpu.load(ref.at[rows]) for ref in (d_qk_ref, d_kk_ref))
    dq += dot(d_qk, k)
    dk += dot(d_qk.T, q) + dot(d_kk, k) - (beta * carried)[:, None] * d_held
    plgpu.store(dq_ref.at[rows], dq.astype(dq_ref.dtype))
    plgpu.store(dk_ref.at[rows], dk.astype(dk_ref.dtype))
    plgpu.store(d_total_ref.at[rows], d_total)


def _inverse(overlap: Float[Array, "c c"]) -> Float[Array, "c c"]:
    """Invert one plus a strictly lower triangular matrix: first its two diagonal blocks, then the block below them.

    The diagonal blocks are inverted by elimination. A series of powers of the matrix would overflow if keys are alike.
    """
    row, column = pair()
    same = row // HALF == column // HALF

    # Both diagonal blocks are eliminated in the same step. The sum over rows picks one pivot row of each block: the two
    # do not overlap, because the inverse is block diagonal in the loop.
    def eliminate(pivot, inverse):
        factor = jnp.sum(jnp.where(column == row // HALF * HALF + pivot, overlap, 0.0), axis=1)
        known = jnp.sum(jnp.where(row % HALF == pivot, inverse, 0.0), axis=0)
        return inverse - jnp.where(same, factor[:, None] * known[None, :], 0.0)

    # The last row of a block has no row below it, so it is never a pivot.
    inverse = jax.lax.fori_loop(0, HALF - 1, eliminate, jnp.where(row == column, 1.0, 0.0))
    # Three bfloat16 products are precise enough, because the result is rounded to 16 bits.
    product = partial(plgpu.dot, precision=jax.lax.DotAlgorithmPreset.BF16_BF16_F32_X3)
    # The inverse of [[A, 0], [C, B]] is [[A', 0], [-B' C A', B']], with A' and B' the inverses of A and B.
    return inverse - product(product(inverse, jnp.where(same, 0.0, overlap)), inverse)
