"""Flash attention for wide heads (head_dim above 256), as Pallas-Triton kernels.

A wide head's queries, keys and results do not fit into registers and shared memory at once. So these kernels differ
from triton.py in two ways. A program sums its logits over slices of the head, in a loop, as a matrix product does. And
it computes only some columns of the results: the programs for the other columns of the same block compute the same
logits again.

Shapes: b batch, s queries, t keys, h query heads, n key heads, d head dimension.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array

from pallas_kernels.flash_attention import launch
from pallas_kernels.flash_attention.launch import Kernels, Shapes, rows_of
from pallas_kernels.flash_attention.tiles import Tile
from pallas_kernels.flash_attention.triton import AMPERE, LOG2_E, WIDEST, Bounds, over_blocks, range_of, unit_of
from pallas_kernels.flash_attention.variant import AttentionRequest, Variant
from pallas_kernels.gpus import Capability, Device, current_device
from pallas_kernels.triton_call import plgpu

SLICE = 64  # columns of the head that a step of the loop over the head reads


def refuses(device: Device, request: AttentionRequest) -> str | None:
    """Return why these kernels cannot run a request on a device, or None."""
    if device.capability is None or device.capability < AMPERE:
        return "it needs an NVIDIA GPU of compute capability 8.0 or later"
    if request.head_dim % SLICE or not WIDEST < request.head_dim <= 2 * WIDEST:
        return f"head_dim must be a multiple of {SLICE} from {WIDEST + SLICE} to {2 * WIDEST}, not {request.head_dim}"
    if request.dtype == jnp.float32:
        return f"head_dim must be at most 128 in float32, not {request.head_dim}"
    return None


@dataclass(frozen=True)
class WideTile(Tile):
    """Block sizes of one kernel.

    Attributes:
        columns: columns of the results that a program computes, at most.
    """

    columns: int


@dataclass(frozen=True)
class WideTiles:
    """The tiles of the three kernels."""

    forward: WideTile
    dq: WideTile
    dkdv: WideTile


# By compute capability, chosen from compile reports like those of tiles.py, and with as many columns as do not spill.
# Before Hopper, and on 12.0, the backward kernels would compute square blocks of 64 twice, because Triton would give
# each of the 8 warps 16 rows.
_MMA_SYNC = WideTiles(WideTile(64, 64, 8, 2, 256), WideTile(32, 64, 8, 2, 256), WideTile(64, 32, 8, 2, 128))
_TILES: dict[Capability, WideTiles] = {
    (8, 0): _MMA_SYNC,
    (9, 0): WideTiles(WideTile(128, 64, 8, 2, 256), WideTile(64, 64, 8, 2, 256), WideTile(32, 64, 8, 2, 256)),
    (10, 0): WideTiles(WideTile(64, 64, 8, 2, 256), WideTile(64, 64, 8, 2, 256), WideTile(64, 64, 8, 2, 256)),
    (12, 0): _MMA_SYNC,
}


def tiles_for(device: Device) -> WideTiles:
    """Return the tiles of the latest listed compute capability that is not later than the GPU's own."""
    capability = max(device.capability or min(_TILES), min(_TILES))
    return _TILES[max(listed for listed in _TILES if listed <= capability)]


class WideShapes(Shapes):
    """Sizes of one call with wide heads. The programs for the columns of one block follow each other in the grid."""

    def __init__(self, q: Array, k: Array, tile: WideTile):
        super().__init__(q, k, tile)
        # The largest power of 2 that divides the head dimension: 64 of 320.
        self.columns = min(tile.columns, self.head_dim & -self.head_dim)
        self.splits = self.head_dim // self.columns

    def block_of(self, program):
        """Return a program's block, given its number in the first dimension of the grid."""
        return jax.lax.div(program, self.splits)

    def my_columns(self) -> pl.Slice:
        """Return the columns of this program."""
        return rows_of(jax.lax.rem(pl.program_id(0), self.splits), self.columns)


def _forward_kernel(
    q_ref, k_ref, v_ref, first_ref, end_ref, seen_ref, ranges_ref, sinks_ref, out_ref, lse_ref, *, shapes, variant
):
    rows, mine = shapes.my_queries(), shapes.my_columns()
    bounds = Bounds(first_ref[rows], end_ref[rows])
    # Logits, maximum and sum are to base 2, because GPUs have an instruction for exp2.
    sink = sinks_ref[...] * LOG2_E
    unit = unit_of(variant)

    def block(j, head, carry, masked):
        out, top, total = carry
        columns = rows_of(j, shapes.block_k)
        (products,) = _contract([(_Rows(q_ref, rows), _Rows(k_ref, columns))], shapes)
        logits = _capped(products, variant)
        if masked:
            logits = jnp.where(bounds.visible(columns), logits, -jnp.inf)
        new_top = jnp.maximum(top, jnp.max(logits, axis=1) * unit)
        # A query that has seen no key yet has a maximum of -inf, and -inf minus -inf would be NaN.
        shift = jnp.where(new_top == -jnp.inf, 0.0, new_top) if masked else new_top
        weights = jnp.exp2(logits * unit - shift[:, None])
        decay = jnp.exp2(top - shift)
        # The weight of a hidden key is 0, but 0 times NaN is NaN: keys that no query sees are loaded as zeros.
        v = _Rows(v_ref, columns).load(mine, seen_ref[columns] if masked else None)
        out = out * decay[:, None] + plgpu.dot(weights.astype(v.dtype), v)
        return out, new_top, total * decay + jnp.sum(weights, axis=1)

    # A sink is a key without a value: it initialises the running maximum and sum.
    top = jnp.zeros(shapes.block_q, jnp.float32) + sink
    carry = jnp.zeros((shapes.block_q, shapes.columns), jnp.float32), top, jnp.where(top == -jnp.inf, 0.0, 1.0)
    out, top, total = over_blocks(block, carry, range_of(ranges_ref))
    # A query that sees no key has a total of 0: its output is 0 and its log-sum-exp -inf.
    total = jnp.where(total == 0.0, 1.0, total)
    plgpu.store(out_ref.at[rows, mine], (out / total[:, None]).astype(out_ref.dtype))
    # Every program of a block writes the same numbers.
    lse_ref[rows] = (top + jnp.log2(total)) / LOG2_E


def _dq_kernel(
    q_ref,
    k_ref,
    v_ref,
    d_out_ref,
    lse_ref,
    delta_ref,
    first_ref,
    end_ref,
    seen_ref,
    ranges_ref,
    dq_ref,
    *,
    shapes,
    variant,
):
    rows, mine = shapes.my_queries(), shapes.my_columns()
    bounds = Bounds(first_ref[rows], end_ref[rows])
    q, d_out = _Rows(q_ref, rows), _Rows(d_out_ref, rows)
    lse, delta = lse_ref[rows] * LOG2_E, delta_ref[rows]

    def block(j, head, dq, masked):
        columns = rows_of(j, shapes.block_k)
        k, v = _Rows(k_ref, columns), _Rows(v_ref, columns)
        products, d_weights = _contract([(q, k), (d_out, v)], shapes)
        logits = _capped(products, variant)
        d_logits = jnp.exp2(logits * unit_of(variant) - lse[:, None]) * (d_weights - delta[:, None])
        # The derivative of tanh is 1 - tanh²; dq is multiplied by the scale once, at the end.
        if variant.soft_cap is not None:
            d_logits *= 1.0 - logits * logits
        if masked:
            d_logits = jnp.where(bounds.visible(columns), d_logits, 0.0)
        k = k.load(mine, seen_ref[columns] if masked else None)
        return dq + plgpu.dot(d_logits.astype(k.dtype), k)

    dq = over_blocks(block, jnp.zeros((shapes.block_q, shapes.columns), jnp.float32), range_of(ranges_ref))
    plgpu.store(dq_ref.at[rows, mine], (dq * variant.scale).astype(dq_ref.dtype))


def _dkdv_kernel(
    q_ref,
    k_ref,
    v_ref,
    d_out_ref,
    lse_ref,
    delta_ref,
    first_ref,
    end_ref,
    ranges_ref,
    dk_ref,
    dv_ref,
    *,
    shapes,
    variant,
):
    columns, mine = rows_of(shapes.block_of(pl.program_id(0)), shapes.block_k), shapes.my_columns()
    k, v = _Rows(k_ref, columns), _Rows(v_ref, columns)

    def block(i, g, carry, masked):
        dk, dv = carry
        rows = rows_of(i, shapes.block_q)
        bounds = Bounds(first_ref[rows], end_ref[rows])
        sees = bounds.sees if masked else None
        lse, delta = lse_ref[g, rows] * LOG2_E, delta_ref[g, rows]
        # Logits are transposed, (keys, queries), so that dk and dv are products of weights that need no transpose.
        q, d_out = _Rows(q_ref, rows, g), _Rows(d_out_ref, rows, g)
        products, d_weights = _contract([(k, q), (v, d_out)], shapes)
        logits = _capped(products, variant)
        weights = jnp.exp2(logits * unit_of(variant) - lse[None, :])
        d_logits = weights * (d_weights - delta[None, :])
        if variant.soft_cap is not None:
            d_logits *= 1.0 - logits * logits
        if masked:
            visible = bounds.visible(columns, transposed=True)
            weights, d_logits = (jnp.where(visible, x, 0.0) for x in (weights, d_logits))
        d_out = d_out.load(mine, sees)
        dv += plgpu.dot(weights.astype(d_out.dtype), d_out)
        q = q.load(mine, sees)
        return dk + plgpu.dot(d_logits.astype(q.dtype), q), dv

    zeros = jnp.zeros((shapes.block_k, shapes.columns), jnp.float32)
    dk, dv = over_blocks(block, (zeros, zeros), range_of(ranges_ref), shapes.group)
    plgpu.store(dk_ref.at[columns, mine], (dk * variant.scale).astype(dk_ref.dtype))
    plgpu.store(dv_ref.at[columns, mine], dv.astype(dv_ref.dtype))


def _contract(pairs: Sequence[tuple["_Rows", "_Rows"]], shapes: WideShapes) -> tuple[Array, ...]:
    """Compute a b^T over the head dimension for each pair, in float32, slice by slice.

    No row is masked, so logits may be NaN, but only where the mask hides them.
    """

    def add(place, sums):
        part = rows_of(place, SLICE)
        products = (plgpu.dot(a.load(part), b.load(part).T) for a, b in pairs)
        return tuple(total + product for total, product in zip(sums, products))

    zeros = tuple(jnp.zeros((a.rows.size, b.rows.size), jnp.float32) for a, b in pairs)
    return jax.lax.fori_loop(0, shapes.head_dim // SLICE, add, zeros)


@dataclass(frozen=True)
class _Rows:
    """Rows of a head: of an array whose last axis is the head dimension, and of whose other axes only rows are left.

    Attributes:
        ref: the array.
        rows: the rows.
        head: index of the head, if the array has several.
    """

    ref: Any
    rows: pl.Slice
    head: Any = None

    def load(self, part: pl.Slice, wanted: Array | None = None) -> Array:
        """Load a part of the head; rows that are not `wanted` are zero."""
        index = (self.rows, part) if self.head is None else (self.rows, self.head, part)
        if wanted is None:
            return plgpu.load(self.ref.at[*index])
        return plgpu.load(self.ref.at[*index], mask=wanted[:, None], other=0.0)


def _capped(products: Array, variant: Variant) -> Array:
    """Return the logits divided by `unit_of`, so that the scale and the change to base 2 are one multiplication."""
    return products if variant.soft_cap is None else jnp.tanh(products * (variant.scale / variant.soft_cap))


KERNELS = Kernels(
    "flash_attention_wide",
    WideShapes,
    lambda q: tiles_for(current_device()),
    _forward_kernel,
    _dq_kernel,
    _dkdv_kernel,
)
forward, backward = partial(launch.forward, KERNELS), partial(launch.backward, KERNELS)
