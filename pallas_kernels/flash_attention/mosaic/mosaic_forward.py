"""Flash attention for Hopper (sm_90a) in Pallas Mosaic GPU, after FlashAttention-3 (Shah et al. 2024).

This file has the forward pass and the parts that it shares with the backward pass in mosaic_backward.py.

A program has three warpgroups: one streams blocks into shared memory by TMA; the other two, the workers, hold 64
queries each and multiply by wgmma. A program reads its range of blocks (blocks.py): hidden blocks are never loaded, and
elements are masked only in blocks that are not fully visible.

Shapes: b batch, s queries, t keys, h query heads, n key heads, d head dimension.
"""

import importlib.metadata
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels import cost
from pallas_kernels.flash_attention.blocks import key_blocks, most_flops, whole_blocks
from pallas_kernels.flash_attention.variant import AttentionRequest, Variant
from pallas_kernels.gpus import Device
from pallas_kernels.warpgroups import PER_ROW, ROWS, WORKERS, Ring, as_memory, as_worker, load, zeros

LOG2_E = math.log2(math.e)
# The initial running maximum: below any logit, and finite, because -inf minus -inf would be NaN.
LOWEST = -1e30


@dataclass(frozen=True)
class StreamTile:
    """Block sizes of a kernel.

    Attributes:
        streamed: rows of a streamed block.
        stages: blocks in flight.
        held: rows that the workers hold together.
    """

    streamed: int
    stages: int
    held: int = WORKERS * ROWS


FORWARD = StreamTile(streamed=128, stages=2)


@dataclass(frozen=True)
class KernelCall:
    """The static parameters of a kernel.

    Attributes:
        tile: block sizes.
        tiles: programs per head.
        group: query heads per key head.
        variant: scale, soft-cap and shape of the mask.
        interpret: run in jax's interpreter on a CPU.
    """

    tile: StreamTile
    tiles: int
    group: int
    variant: Variant
    interpret: bool


def refuses(device: Device, request: AttentionRequest) -> str | None:
    """Return why these kernels cannot run a request on a Hopper GPU, or None."""
    if request.dtype not in (jnp.bfloat16, jnp.float16):
        return f"it multiplies bfloat16 and float16, not {jnp.dtype(request.dtype).name}"
    if request.head_dim not in (64, 128):
        return f"head_dim must be 64 or 128, not {request.head_dim}"
    if request.head_dim == 128 and request.variant.soft_cap is not None:
        return "its backward pass would spill registers with a soft-cap at head_dim 128"
    return _miscompiles()


def _miscompiles() -> str | None:
    """Return a reason if the installed ptxas miscompiles masked attention, or None.

    The ptxas of CUDA 12.8.0 to 12.9.0 does; jax refuses it for its own masked attention kernel too.
    """
    try:
        version = importlib.metadata.version("nvidia-cuda-nvcc-cu12")
    except importlib.metadata.PackageNotFoundError:
        return None
    if (12, 8) <= tuple(int(part) for part in version.split(".")[:3]) < (12, 9, 86):
        return f"ptxas {version} miscompiles masked attention: pip install 'nvidia-cuda-nvcc-cu12>=12.9.86'"
    return None


def forward(
    q: Float[Array, "b s h d"],
    k: Float[Array, "b t n d"],
    v: Float[Array, "b t n d"],
    first: Int[Array, "b s"],
    end: Int[Array, "b s"],
    sinks: Float[Array, " h"] | None,
    variant: Variant,
    *,
    interpret: bool = False,
) -> tuple[Float[Array, "b s h d"], Float[Array, "b h s"]]:
    """Return the output, and the log-sum-exp in float32.

    `interpret` runs the kernel in jax's interpreter on a CPU (jax 0.12 or later).
    """
    tile, queries, heads = FORWARD, q.shape[1], q.shape[2]
    q, k, v = silence(q, k, v, first, end)
    q, first, end = (whole_blocks(x, tile.held) for x in (q, first, end))
    k, v = (whole_blocks(x, tile.streamed) for x in (k, v))
    # To base 2, like all logits in the kernel; LOWEST means no sink.
    sinks = jnp.full(heads, -jnp.inf) if sinks is None else sinks
    sinks = jnp.maximum(sinks.astype(jnp.float32) * LOG2_E, LOWEST)
    call = KernelCall(tile, q.shape[1] // tile.held, heads // k.shape[2], variant, interpret)
    blocks = matrices(k, tile.stages, tile.streamed)
    run = kernel(
        _forward_kernel,
        call,
        grid=(call.tiles, q.shape[0], heads),
        out_type=[like(q), jax.ShapeDtypeStruct((q.shape[0], heads, q.shape[1]), jnp.float32)],
        scratch_types={
            "q_smem": matrices(q, WORKERS, ROWS),
            "bounds_smem": plgpu.SMEM((WORKERS, 2, ROWS), jnp.int32),
            "lse_smem": plgpu.SMEM((WORKERS, ROWS), jnp.float32),
            "held": plgpu.Barrier(num_arrivals=2, num_barriers=WORKERS),
            "keys": Ring.scratch(tile.stages, blocks),
            "values": Ring.scratch(tile.stages, blocks),
            "turn": plgpu.Barrier(num_arrivals=WORKERS),
        },
    )
    bounds, ranges = jnp.stack([first, end], axis=1), key_blocks(first, end, k.shape[1], tile.held, tile.streamed)
    with cost.flops(most_flops(variant, q, k, tile.held, tile.streamed, products=2)):
        out, lse = run(q, k, v, bounds, ranges, sinks)
    return out[:, :queries], lse[:, :, :queries]


def _forward_kernel(
    q_ref,
    k_ref,
    v_ref,
    bounds_ref,
    ranges_ref,
    sinks_ref,
    out_ref,
    lse_ref,
    *,
    q_smem,
    bounds_smem,
    lse_smem,
    held,
    keys,
    values,
    turn,
    call: KernelCall,
):
    tile, batch, head = call.tile, jax.lax.axis_index("batch"), jax.lax.axis_index("head")
    # With a causal mask the last queries see the most keys, so their programs are the longest and start first.
    index = call.tiles - 1 - jax.lax.axis_index("tile")
    order = Order.read(ranges_ref, batch, index)
    keys, values = Ring(*keys), Ring(*values)

    @as_worker
    def _(worker):
        rows = pl.ds(index * tile.held + worker * ROWS, ROWS)
        q, bounds = q_smem.at[worker], bounds_smem.at[worker]
        plgpu.copy_gmem_to_smem(q_ref.at[batch, rows, head], q, held.at[worker])
        plgpu.copy_gmem_to_smem(bounds_ref.at[batch, :, rows], bounds, held.at[worker])
        plgpu.barrier_wait(held.at[worker])
        bounds = load_pair(bounds, PER_ROW)

        # The workers take turns: while the products of one run, the other computes its softmax.
        def pass_turn():
            plgpu.barrier_arrive(turn)
            plgpu.barrier_wait(turn)

        def block(step, carry, masked):
            (k,) = keys.take(step)
            (products,) = multiply((None, q, transpose_ref(k)), then=pass_turn, call=call)
            keys.release(step)
            logits, unit = cap_products(products, call.variant), unit_of(call.variant)
            if masked:
                start = order.masked_block(step) * tile.streamed
                logits = jnp.where(within(bounds, start, logits.shape, PER_ROW), logits, -jnp.inf)
            out, top, total, weights = _online_softmax(logits, unit, carry)
            # The softmax ends here: without this barrier the compiler could move parts of it past the turn.
            out, total, weights = jax.lax.optimization_barrier((out, total, weights.astype(v_ref.dtype)))
            plgpu.barrier_arrive(turn)
            (v,) = values.take(step)
            plgpu.barrier_wait(turn)
            (out,) = multiply((out, weights, v), call=call)
            values.release(step)
            return out, top, total

        # A sink is a key without a value: it initialises the running maximum and sum.
        sink = sinks_ref[head]
        start = zeros(ROWS, q.shape[1]), _vector(sink), _vector(jnp.where(sink > LOWEST, 1.0, 0.0))
        # Worker 1 starts when worker 0 has issued its first products; worker 0 passes the last turn after its loop.
        pl.when(worker == 1)(pass_turn)
        out, top, total = order.loop(block, start)
        pl.when(worker == 0)(pass_turn)

        lse_smem[worker] = (top + jnp.log2(total)) / LOG2_E
        # A query that sees no key has a total of 0: its output is 0. The output is staged in the memory of q.
        inverse = 1.0 / jnp.where(total == 0.0, 1.0, total)
        q[...] = (out * spread(inverse, out, PER_ROW)).astype(q.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(q, out_ref.at[batch, rows, head])
        plgpu.copy_smem_to_gmem(lse_smem.at[worker], lse_ref.at[batch, head, rows])
        plgpu.wait_smem_to_gmem(0)

    @as_memory
    def _():
        @pl.loop(0, order.total)
        def _(step):
            rows = (batch, pl.ds(order.block(step) * tile.streamed, tile.streamed), jax.lax.div(head, call.group))
            keys.fill(step, k_ref.at[rows])
            values.fill(step, v_ref.at[rows])


def _online_softmax(logits, unit, carry):
    """Update the carry (out, top, total) with more logits and return it with their weights.

    This is the online softmax of Milakov & Gimelshein 2018.
    """
    out, top, total = carry
    new_top = jnp.maximum(top, jnp.max(logits, axis=1) * unit)
    weights = jnp.exp2(logits * unit - spread(new_top, logits, PER_ROW))
    decay = jnp.exp2(top - new_top)
    total = total * decay + jnp.sum(weights, axis=1)
    return out * spread(decay, out, PER_ROW), new_top, total, weights


def _vector(value):
    return plgpu.layout_cast(jnp.full((ROWS,), value, jnp.float32), PER_ROW)


def kernel(body: Callable, call: KernelCall, **shapes) -> Callable:
    """Make a kernel with one memory warpgroup and the workers, over a grid of (tile, batch, head)."""
    # In the interpreter, memory starts as NaN and a race is an error.
    options = {}
    if call.interpret:
        options["interpret"] = plgpu.InterpretGPUParams(detect_races=True)  # pyright: ignore[reportAttributeAccessIssue]
    launch = plgpu.kernel(
        partial(body, call=call),
        kernel_name="flash_attention" + body.__name__.removesuffix("_kernel"),
        grid_names=("tile", "batch", "head"),
        num_threads=WORKERS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **shapes,
        **options,
    )

    def run(q: Array, *operands: Array) -> list[Array]:
        # Inside a shard_map, Mosaic's outputs lack the mesh axes over which they vary.
        axes = tuple(jax.typeof(q).manual_axis_type.varying)
        outputs = launch(q, *operands)
        return [jax.lax.pcast(x, axes, to="varying") for x in outputs] if axes else outputs

    return run


@dataclass(frozen=True)
class Order:
    """The order in which a program visits its blocks: first the blocks to mask, then the fully visible ones.

    The attributes are the range (blocks.py).
    """

    begin: Array
    full_begin: Array
    full_end: Array
    stop: Array

    @classmethod
    def read(cls, ranges_ref, batch, index) -> "Order":
        """Read the range of the index-th program."""
        return cls(*(ranges_ref[batch, index, bound] for bound in range(4)))

    @property
    def total(self):
        """The number of blocks."""
        return self.stop - self.begin

    @property
    def masked(self):
        """The number of blocks to mask."""
        return self.total - (self.full_end - self.full_begin)

    def block(self, step):
        """Return the index of the block visited at a step."""
        return jnp.where(step < self.masked, self.masked_block(step), self.full_begin + step - self.masked)

    def masked_block(self, step):
        """Return the index of the block visited at a step that masks."""
        # Blocks to mask are on both sides of the fully visible ones: [begin, full_begin), then [full_end, stop).
        before = self.full_begin - self.begin
        return step + jnp.where(step < before, self.begin, self.full_end - before)

    def loop(self, block: Callable, carry):
        """Run `block(step, carry, masked)` over all steps and return the last carry."""
        carry = jax.lax.fori_loop(0, self.masked, partial(block, masked=True), carry)
        return jax.lax.fori_loop(self.masked, self.total, partial(block, masked=False), carry)


def multiply(*products, call: KernelCall, then: Callable[[], None] = lambda: None) -> Any:
    """Compute accumulator + a b in float32 for each (accumulator or None, a, b).

    b is in shared memory, a in shared memory or registers. All products are issued and `then` is called before the
    first product is awaited.
    """
    if call.interpret:
        sums = [_multiply_interpreted(*product) for product in products]
        then()
        return sums
    starts = [zeros(a.shape[0], b.shape[1]) if start is None else start for start, a, b in products]

    def issue(accumulators):
        for accumulator, (_, a, b) in zip(accumulators, products):
            plgpu.wgmma(accumulator, a, b)
        then()

    return pl.run_state(issue)([plgpu.ACC.init(start) for start in starts])  # pyright: ignore[reportPrivateImportUsage]


def _multiply_interpreted(start, a, b):
    """Compute a product in jax's interpreter.

    The interpreter's wgmma takes no operand or accumulator from registers and does not check for races.
    """
    left, right = a if isinstance(a, jax.Array) else a[...], b[...]
    # Unlike wgmma's loads, these plain loads must be committed before TMA may overwrite the memory.
    plgpu.commit_smem()
    product = jnp.dot(left, right, preferred_element_type=jnp.float32)
    return product if start is None else start + product


def within(bounds, start, shape: tuple[int, ...], layout):
    """Return True where a query (row) sees a key (column, the first is key `start`). PER_COLUMN transposes it."""
    queries = 0 if layout is PER_ROW else 1
    key = plgpu.broadcasted_iota(jnp.int32, shape, 1 - queries, layout=plgpu.Layout.WGMMA)
    first, end = (jax.lax.broadcast_in_dim(bound - start, shape, [queries]) for bound in bounds)
    return (key >= first) & (key < end)


def cap_products(products, variant: Variant):
    """Return the logits divided by `unit_of`, so that the scale and the change to base 2 are one multiplication."""
    return products if variant.soft_cap is None else jnp.tanh(products * (variant.scale / variant.soft_cap))


def unit_of(variant: Variant) -> float:
    """Return the factor that turns the results of `cap_products` into logits to base 2."""
    return (variant.scale if variant.soft_cap is None else variant.soft_cap) * LOG2_E


def spread(vector, matrix, layout):
    """Broadcast a vector over the columns of a matrix (PER_ROW), or over its rows (PER_COLUMN)."""
    return jax.lax.broadcast_in_dim(vector, matrix.shape, [0 if layout is PER_ROW else 1])


def load_pair(ref, layout):
    """Load two vectors that one copy brought to shared memory."""
    return load(ref.at[0], layout), load(ref.at[1], layout)


def transpose_ref(ref):
    """Return a transposed view of the same shared memory."""
    return ref.transpose((1, 0))


def silence(q, k, v, first, end):
    """Set queries that see no key, and keys that no query sees, to zero.

    They may hold NaN, and zero times NaN is NaN.
    """
    sees = first < end
    row, one = jnp.arange(first.shape[0])[:, None], sees.astype(jnp.int32)
    steps = jnp.zeros((first.shape[0], k.shape[1] + 1), jnp.int32).at[row, first].add(one).at[row, end].add(-one)
    seen = jnp.cumsum(steps, axis=1)[:, :-1] > 0
    return jnp.where(sees[..., None, None], q, 0), *(jnp.where(seen[..., None, None], x, 0) for x in (k, v))


def matrices(x: Array, count: int, rows: int):
    """Return shared memory for `count` matrices of `rows` rows of a head of x.

    Its layout is the tiles that wgmma reads: 8 rows of 128 bytes, swizzled.
    """
    transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    return plgpu.SMEM((count, rows, x.shape[-1]), x.dtype, transforms=transforms)


def like(x: Array) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype of an output like x."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype)
