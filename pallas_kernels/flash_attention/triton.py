"""Flash attention (Dao et al. 2022, Dao 2023) as Pallas-Triton kernels, for GPUs from sm_80 on.

There are three kernels. In forward and dq a program holds a block of queries and loops over the keys that it sees. In
dkdv a program holds a block of keys and loops over the query heads that share it and the queries that see it, so that
no sum needs an atomic. Each program reads its range of blocks (blocks.py) and masks elements only in blocks that are
not fully visible.

Shapes: b batch, s queries, t keys, h query heads, n key heads, d head dimension.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array

from pallas_kernels.flash_attention import launch
from pallas_kernels.flash_attention.launch import Kernels, Shapes, rows_of
from pallas_kernels.flash_attention.tiles import tiles_for
from pallas_kernels.flash_attention.variant import AttentionRequest, Variant
from pallas_kernels.gpus import Capability, Device, current_device
from pallas_kernels.triton_call import plgpu

AMPERE: Capability = (8, 0)
WIDEST = 256  # head dimension; wider heads have kernels of their own (triton_wide.py)
LOG2_E = math.log2(math.e)


def refuses(device: Device, request: AttentionRequest) -> str | None:
    """Return why these kernels cannot run a request on a device, or None."""
    if device.capability is None or device.capability < AMPERE:
        return "it needs an NVIDIA GPU of compute capability 8.0 or later"
    if request.head_dim % 8 or request.head_dim > WIDEST:
        return f"head_dim must be a multiple of 8 and at most {WIDEST}, not {request.head_dim}"
    if request.dtype == jnp.float32 and request.head_dim > 128:
        return f"head_dim must be at most 128 in float32, not {request.head_dim}"
    return None


def _forward_kernel(
    q_ref, k_ref, v_ref, first_ref, end_ref, seen_ref, ranges_ref, sinks_ref, out_ref, lse_ref, *, shapes, variant
):
    rows = shapes.my_queries()
    bounds = Bounds(first_ref[rows], end_ref[rows])
    q = _load(q_ref, rows, shapes, bounds.sees)
    # Logits, maximum and sum are to base 2, because GPUs have an instruction for exp2.
    sink = sinks_ref[...] * LOG2_E
    unit = unit_of(variant)

    def block(j, head, carry, masked):
        out, top, total = carry
        columns = rows_of(j, shapes.block_k)
        logits = _logits(q, _load(k_ref, columns, shapes), variant, shapes)
        if masked:
            logits = jnp.where(bounds.visible(columns), logits, -jnp.inf)
        new_top = jnp.maximum(top, jnp.max(logits, axis=1) * unit)
        # A query that has seen no key yet has a maximum of -inf, and -inf minus -inf would be NaN.
        shift = jnp.where(new_top == -jnp.inf, 0.0, new_top) if masked else new_top
        weights = jnp.exp2(logits * unit - shift[:, None])
        decay = jnp.exp2(top - shift)
        # The weight of a hidden key is 0, but 0 times NaN is NaN: keys that no query sees are loaded as zeros. A fully
        # visible block has no such keys.
        v = _load(v_ref, columns, shapes, seen_ref[columns] if masked else None)
        products = _multiply(weights.astype(v_ref.dtype), v, shapes)
        out = tuple(part * decay[:, None] + product for part, product in zip(out, products))
        return out, new_top, total * decay + jnp.sum(weights, axis=1)

    # A sink is a key without a value: it initialises the running maximum and sum.
    top = jnp.zeros(shapes.block_q, jnp.float32) + sink
    carry = _zeros(shapes.block_q, shapes), top, jnp.where(top == -jnp.inf, 0.0, 1.0)
    out, top, total = over_blocks(block, carry, range_of(ranges_ref))
    # A query that sees no key has a total of 0: its output is 0 and its log-sum-exp -inf.
    total = jnp.where(total == 0.0, 1.0, total)
    _store(out_ref, rows, tuple(part / total[:, None] for part in out), shapes)
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
    rows = shapes.my_queries()
    bounds = Bounds(first_ref[rows], end_ref[rows])
    q, d_out = (_load(ref, rows, shapes, bounds.sees) for ref in (q_ref, d_out_ref))
    lse, delta = lse_ref[rows] * LOG2_E, delta_ref[rows]

    def block(j, head, dq, masked):
        columns = rows_of(j, shapes.block_k)
        k = _load(k_ref, columns, shapes, seen_ref[columns] if masked else None)
        v = _load(v_ref, columns, shapes)
        logits = _logits(q, k, variant, shapes)
        weights = jnp.exp2(logits * unit_of(variant) - lse[:, None])
        # The derivative of the softmax. delta is its sum over all keys, so one pass over the keys is enough.
        d_logits = weights * (_contract(d_out, v, shapes) - delta[:, None])
        # The derivative of tanh is 1 - tanh²; dq is multiplied by the scale once, at the end.
        if variant.soft_cap is not None:
            d_logits *= 1.0 - logits * logits
        if masked:
            d_logits = jnp.where(bounds.visible(columns), d_logits, 0.0)
        products = _multiply(d_logits.astype(k_ref.dtype), k, shapes)
        return tuple(part + product for part, product in zip(dq, products))

    dq = over_blocks(block, _zeros(shapes.block_q, shapes), range_of(ranges_ref))
    _store(dq_ref, rows, tuple(part * variant.scale for part in dq), shapes)


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
    columns = rows_of(pl.program_id(0), shapes.block_k)
    k, v = (_load(ref, columns, shapes) for ref in (k_ref, v_ref))

    def block(i, g, carry, masked):
        dk, dv = carry
        rows = rows_of(i, shapes.block_q)
        bounds = Bounds(first_ref[rows], end_ref[rows])
        sees = bounds.sees if masked else None
        q, d_out = (_load(ref, (rows, g), shapes, sees) for ref in (q_ref, d_out_ref))
        lse, delta = lse_ref[g, rows] * LOG2_E, delta_ref[g, rows]
        # Logits are transposed, (keys, queries), so that dk and dv are products of weights that need no transpose.
        logits = _logits(k, q, variant, shapes)
        weights = jnp.exp2(logits * unit_of(variant) - lse[None, :])
        if masked:
            visible = bounds.visible(columns, transposed=True)
            weights = jnp.where(visible, weights, 0.0)
        products = _multiply(weights.astype(v_ref.dtype), d_out, shapes)
        dv = tuple(part + product for part, product in zip(dv, products))
        d_logits = weights * (_contract(v, d_out, shapes) - delta[None, :])
        if variant.soft_cap is not None:
            d_logits *= 1.0 - logits * logits
        if masked:
            d_logits = jnp.where(visible, d_logits, 0.0)
        products = _multiply(d_logits.astype(k_ref.dtype), q, shapes)
        return tuple(part + product for part, product in zip(dk, products)), dv

    zeros = _zeros(shapes.block_k, shapes)
    dk, dv = over_blocks(block, (zeros, zeros), range_of(ranges_ref), shapes.group)
    _store(dk_ref, columns, tuple(part * variant.scale for part in dk), shapes)
    _store(dv_ref, columns, dv, shapes)


class Bounds:
    """Masks of a block of queries, from the first key that each query sees and the end of its keys."""

    def __init__(self, first: Array, end: Array):
        self.first, self.end = first, end
        self.sees = first < end

    def visible(self, columns: pl.Slice, transposed: bool = False) -> Array:
        """Return the mask, (queries, keys) or transposed."""
        key = _index(columns)
        if transposed:
            return (key[:, None] >= self.first[None, :]) & (key[:, None] < self.end[None, :])
        return (key[None, :] >= self.first[:, None]) & (key[None, :] < self.end[:, None])


def _index(rows: pl.Slice) -> Array:
    return rows.start + jnp.arange(rows.size, dtype=jnp.int32)


def range_of(ranges_ref) -> Sequence[Any]:
    """Load the four bounds of a range of blocks."""
    return tuple(ranges_ref[bound] for bound in range(4))


def over_blocks(block: Callable, carry, ranges: Sequence[Any], heads: int = 1):
    """Run `block(index, head, carry, masked)` over a range and some heads: fully visible blocks, then the others."""
    begin, full_begin, full_end, stop = ranges
    before = full_begin - begin

    def visible(place, carry):
        return block(full_begin + jax.lax.div(place, heads), jax.lax.rem(place, heads), carry, masked=False)

    def partly_visible(place, carry):
        # These blocks are on both sides of the fully visible ones: [begin, full_begin), then [full_end, stop).
        index = jax.lax.div(place, heads)
        index += jnp.where(index < before, begin, full_end - before)
        return block(index, jax.lax.rem(place, heads), carry, masked=True)

    carry = jax.lax.fori_loop(0, (full_end - full_begin) * heads, visible, carry)
    return jax.lax.fori_loop(0, (before + stop - full_end) * heads, partly_visible, carry)


def _zeros(rows: int, shapes: Shapes) -> tuple[Array, ...]:
    return tuple(jnp.zeros((rows, part.size), jnp.float32) for part in shapes.parts)


def _load(ref, rows: pl.Slice | tuple, shapes: Shapes, wanted: Array | None = None) -> tuple[Array, ...]:
    """Load rows (and a head) of an array whose last axis is the head dimension, in parts.

    Rows that are not `wanted` are zero.
    """
    index = rows if isinstance(rows, tuple) else (rows,)
    if wanted is None:
        return tuple(plgpu.load(ref.at[*index, part]) for part in shapes.parts)
    return tuple(plgpu.load(ref.at[*index, part], mask=wanted[:, None], other=0.0) for part in shapes.parts)


def _store(ref, rows: pl.Slice, parts: tuple[Array, ...], shapes: Shapes) -> None:
    for place, part in zip(shapes.parts, parts):
        plgpu.store(ref.at[rows, place], part.astype(ref.dtype))


def _contract(a: tuple[Array, ...], b: tuple[Array, ...], shapes: Shapes) -> Array:
    """Compute a b^T over the head dimension, in float32."""
    return reduce(jnp.add, (plgpu.dot(x, y.T, precision=shapes.precision) for x, y in zip(a, b)))


def _multiply(a: Array, b: tuple[Array, ...], shapes: Shapes) -> tuple[Array, ...]:
    """Compute a b in float32, in parts of the head dimension."""
    return tuple(plgpu.dot(a, part, precision=shapes.precision) for part in b)


def _logits(a: tuple[Array, ...], b: tuple[Array, ...], variant: Variant, shapes: Shapes) -> Array:
    """Return the logits divided by `unit_of`, so that the scale and the change to base 2 are one multiplication."""
    products = _contract(a, b, shapes)
    return products if variant.soft_cap is None else jnp.tanh(products * (variant.scale / variant.soft_cap))


def unit_of(variant: Variant) -> float:
    """Return the factor by which products, capped if the variant says so, become logits to base 2."""
    return (variant.scale if variant.soft_cap is None else variant.soft_cap) * LOG2_E


KERNELS = Kernels(
    "flash_attention",
    Shapes,
    lambda q: tiles_for(current_device(), q.shape[-1], q.dtype.itemsize),
    _forward_kernel,
    _dq_kernel,
    _dkdv_kernel,
)
forward, backward = partial(launch.forward, KERNELS), partial(launch.backward, KERNELS)
