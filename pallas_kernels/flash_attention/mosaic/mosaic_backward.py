"""Flash attention for Hopper in Pallas Mosaic GPU: the backward pass, two kernels.

In dq the workers hold 64 queries each and visit the keys that these queries see. In dkdv they hold 64 keys each and
visit the queries that see these keys, in all query heads that share the key head. So no sum needs an atomic, and all
sums are deterministic.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels import cost
from pallas_kernels.flash_attention.blocks import key_blocks, most_flops, query_blocks, whole_blocks
from pallas_kernels.flash_attention.mosaic.mosaic_forward import (
    LOG2_E,
    KernelCall,
    Order,
    StreamTile,
    cap_products,
    kernel,
    like,
    load_pair,
    matrices,
    multiply,
    silence,
    spread,
    transpose_ref,
    unit_of,
    within,
)
from pallas_kernels.flash_attention.variant import Variant
from pallas_kernels.warpgroups import PER_COLUMN, PER_ROW, ROWS, WORKERS, Ring, as_memory, as_worker, load, zeros

# dk and dv occupy half of a worker's registers, so blocks of logits are smaller than in the forward pass.
DQ, DKDV = StreamTile(streamed=64, stages=2), StreamTile(streamed=64, stages=2)


def backward(
    q: Float[Array, "b s h d"],
    k: Float[Array, "b t n d"],
    v: Float[Array, "b t n d"],
    first: Int[Array, "b s"],
    end: Int[Array, "b s"],
    lse: Float[Array, "b h s"],
    delta: Float[Array, "b h s"],
    d_out: Float[Array, "b s h d"],
    variant: Variant,
    *,
    interpret: bool = False,
) -> tuple[Float[Array, "b s h d"], Float[Array, "b t n d"], Float[Array, "b t n d"]]:
    """Return gradients of q, k and v. `interpret` as in the forward pass."""
    queries, keys = q.shape[1], k.shape[1]
    q, k, v = silence(q, k, v, first, end)
    d_out = jnp.where((first < end)[..., None, None], d_out, 0)
    # Pad for both kernels; stack bounds and statistics in pairs, so that one copy brings a pair.
    block = max(DQ.held, DKDV.streamed)
    q, d_out, first, end = (whole_blocks(x, block) for x in (q, d_out, first, end))
    k, v = (whole_blocks(x, max(DQ.streamed, DKDV.held)) for x in (k, v))
    bounds = jnp.stack([first, end], axis=1)
    statistics = whole_blocks(jnp.stack([lse * LOG2_E, delta], axis=2), block, axis=3)
    arrays = q, k, v, d_out, bounds, statistics
    dq = _dq(*arrays, key_blocks(first, end, k.shape[1], DQ.held, DQ.streamed), variant, interpret)
    ranges = query_blocks(first, end, k.shape[1], DKDV.streamed, DKDV.held)
    dk, dv = _dkdv(*arrays, ranges, variant, interpret)
    return dq[:, :queries], dk[:, :keys], dv[:, :keys]


def _dq(q, k, v, d_out, bounds, statistics, ranges, variant, interpret):
    batch, queries, heads, _ = q.shape
    call = KernelCall(DQ, queries // DQ.held, heads // k.shape[2], variant, interpret)
    blocks = matrices(k, DQ.stages, DQ.streamed)
    run = kernel(
        _dq_kernel,
        call,
        grid=(call.tiles, batch, heads),
        out_type=[like(q)],
        scratch_types={
            "q_smem": matrices(q, WORKERS, ROWS),
            "d_out_smem": matrices(q, WORKERS, ROWS),
            "bounds_smem": plgpu.SMEM((WORKERS, 2, ROWS), jnp.int32),
            "statistics_smem": plgpu.SMEM((WORKERS, 2, ROWS), jnp.float32),
            "held": plgpu.Barrier(num_arrivals=4, num_barriers=WORKERS),
            "keys": Ring.scratch(DQ.stages, blocks, blocks),
        },
    )
    with cost.flops(most_flops(variant, q, k, DQ.held, DQ.streamed, products=3)):
        (dq,) = run(q, k, v, d_out, bounds, statistics, ranges)
    return dq


def _dq_kernel(
    q_ref,
    k_ref,
    v_ref,
    d_out_ref,
    bounds_ref,
    statistics_ref,
    ranges_ref,
    dq_ref,
    *,
    q_smem,
    d_out_smem,
    bounds_smem,
    statistics_smem,
    held,
    keys,
    call: KernelCall,
):
    tile, batch, head = call.tile, jax.lax.axis_index("batch"), jax.lax.axis_index("head")
    # The longest programs start first, as in the forward pass.
    index = call.tiles - 1 - jax.lax.axis_index("tile")
    order, keys = Order.read(ranges_ref, batch, index), Ring(*keys)

    @as_worker
    def _(worker):
        rows = pl.ds(index * tile.held + worker * ROWS, ROWS)
        q, d_out, bounds, statistics = (smem.at[worker] for smem in (q_smem, d_out_smem, bounds_smem, statistics_smem))
        for source, smem in (
            (q_ref.at[batch, rows, head], q),
            (d_out_ref.at[batch, rows, head], d_out),
            (bounds_ref.at[batch, :, rows], bounds),
            (statistics_ref.at[batch, head, :, rows], statistics),
        ):
            plgpu.copy_gmem_to_smem(source, smem, held.at[worker])
        plgpu.barrier_wait(held.at[worker])

        # Bounds and statistics are loaded in every step: keeping them in registers would spill.
        def block(step, dq, masked):
            k, v = keys.take(step)
            products, d_weights = multiply((None, q, transpose_ref(k)), (None, d_out, transpose_ref(v)), call=call)
            logits = cap_products(products, call.variant)
            lse = load(statistics.at[0], PER_ROW)
            weights = jnp.exp2(logits * unit_of(call.variant) - spread(lse, logits, PER_ROW))
            if masked:
                start = order.masked_block(step) * tile.streamed
                weights = jnp.where(within(load_pair(bounds, PER_ROW), start, weights.shape, PER_ROW), weights, 0.0)
            delta = load(statistics.at[1], PER_ROW)
            d_logits = weights * _slope(logits, call.variant) * (d_weights - spread(delta, weights, PER_ROW))
            (dq,) = multiply((dq, d_logits.astype(k.dtype), k), call=call)
            keys.release(step)
            return dq

        dq = order.loop(block, zeros(ROWS, q.shape[1]))
        # dq is staged in the memory of q.
        q[...] = (dq * call.variant.scale).astype(q.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(q, dq_ref.at[batch, rows, head])
        plgpu.wait_smem_to_gmem(0)

    @as_memory
    def _():
        @pl.loop(0, order.total)
        def _(step):
            rows = (batch, pl.ds(order.block(step) * tile.streamed, tile.streamed), jax.lax.div(head, call.group))
            keys.fill(step, k_ref.at[rows], v_ref.at[rows])


def _dkdv(q, k, v, d_out, bounds, statistics, ranges, variant, interpret):
    batch, keys, kv_heads, _ = k.shape
    call = KernelCall(DKDV, keys // DKDV.held, q.shape[2] // kv_heads, variant, interpret)
    blocks = matrices(q, DKDV.stages, DKDV.streamed)
    pairs = [plgpu.SMEM((DKDV.stages, 2, DKDV.streamed), dtype) for dtype in (jnp.int32, jnp.float32)]
    run = kernel(
        _dkdv_kernel,
        call,
        grid=(call.tiles, batch, kv_heads),
        out_type=[like(k), like(v)],
        scratch_types={
            "k_smem": matrices(k, WORKERS, ROWS),
            "v_smem": matrices(v, WORKERS, ROWS),
            "held": plgpu.Barrier(num_arrivals=2, num_barriers=WORKERS),
            "queries": Ring.scratch(DKDV.stages, blocks, blocks, *pairs),
        },
    )
    with cost.flops(most_flops(variant, q, k, DKDV.streamed, DKDV.held, products=4)):
        dk, dv = run(q, k, v, d_out, bounds, statistics, ranges)
    return dk, dv


def _dkdv_kernel(
    q_ref,
    k_ref,
    v_ref,
    d_out_ref,
    bounds_ref,
    statistics_ref,
    ranges_ref,
    dk_ref,
    dv_ref,
    *,
    k_smem,
    v_smem,
    held,
    queries,
    call: KernelCall,
):
    """Compute dk and dv of a block of keys.

    Logits are transposed, (keys, queries), so that the weights are a left operand, which wgmma takes from registers.
    """
    tile, batch, kv_head = call.tile, jax.lax.axis_index("batch"), jax.lax.axis_index("head")
    index = jax.lax.axis_index("tile")
    order, queries = Order.read(ranges_ref, batch, index), Ring(*queries)

    @as_worker
    def _(worker):
        start = index * tile.held + worker * ROWS
        rows = (batch, pl.ds(start, ROWS), kv_head)
        k, v = k_smem.at[worker], v_smem.at[worker]
        plgpu.copy_gmem_to_smem(k_ref.at[rows], k, held.at[worker])
        plgpu.copy_gmem_to_smem(v_ref.at[rows], v, held.at[worker])
        plgpu.barrier_wait(held.at[worker])

        def head(member, carry):
            def block(step, carry, masked):
                dk, dv = carry
                count = member * order.total + step
                q, d_out, bounds, statistics = queries.take(count)
                (products,) = multiply((None, k, transpose_ref(q)), call=call)
                logits = cap_products(products, call.variant)
                lse = spread(load(statistics.at[0], PER_COLUMN), logits, PER_COLUMN)
                weights = jnp.exp2(logits * unit_of(call.variant) - lse)
                if masked:
                    visible = within(load_pair(bounds, PER_COLUMN), start, weights.shape, PER_COLUMN)
                    weights = jnp.where(visible, weights, 0.0)
                # dv needs the weights themselves, dk the weights times the soft-cap's derivative.
                operand, weights = weights.astype(v.dtype), weights * _slope(logits, call.variant)
                # One product at a time: two in flight need more registers than a thread can have.
                (dv,) = multiply((dv, operand, d_out), call=call)
                (d_weights,) = multiply((None, v, transpose_ref(d_out)), call=call)
                delta = spread(load(statistics.at[1], PER_COLUMN), weights, PER_COLUMN)
                (dk,) = multiply((dk, (weights * (d_weights - delta)).astype(k.dtype), q), call=call)
                # Bounds and statistics were read by plain loads: commit these before TMA writes to the slot again.
                plgpu.commit_smem()
                queries.release(count)
                return dk, dv

            return order.loop(block, carry)

        dk, dv = jax.lax.fori_loop(0, call.group, head, (zeros(ROWS, k.shape[1]), zeros(ROWS, k.shape[1])))
        # dk and dv are staged in the memory of k and v.
        k[...] = (dk * call.variant.scale).astype(k.dtype)
        v[...] = dv.astype(v.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(k, dk_ref.at[rows])
        plgpu.copy_smem_to_gmem(v, dv_ref.at[rows])
        plgpu.wait_smem_to_gmem(0)

    @as_memory
    def _():
        @pl.loop(0, call.group)
        def _(member):
            head = kv_head * call.group + member

            @pl.loop(0, order.total)
            def _(step):
                rows = pl.ds(order.block(step) * tile.streamed, tile.streamed)
                queries.fill(
                    member * order.total + step,
                    q_ref.at[batch, rows, head],
                    d_out_ref.at[batch, rows, head],
                    bounds_ref.at[batch, :, rows],
                    statistics_ref.at[batch, head, :, rows],
                )


def _slope(logits, variant: Variant):
    """Return the derivative of the soft-cap, from the result of `cap_products`."""
    return 1.0 if variant.soft_cap is None else 1.0 - logits * logits
