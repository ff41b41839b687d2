"""Grouped products with quantized weights as Pallas-Triton kernels, which decode weights tile by tile, in registers.

As in `quant_matmul.fused`, the two elements of a byte are never interleaved: the high bits of the bytes are multiplied
by the even columns of x (or give the even columns of the result), the low bits by the odd columns.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, UInt8

from pallas_kernels import cost
from pallas_kernels.grouped_matmul import Groups
from pallas_kernels.quant_matmul.fused import decode_tile, read_tile
from pallas_kernels.quant_matmul.layout import WeightLayout
from pallas_kernels.quant_matmul.triton import kernel_operands, span, whole_array_spec
from pallas_kernels.triton_call import plgpu, triton_call


@dataclass(frozen=True)
class GroupedQuantTile:
    """Block sizes of a program.

    Attributes:
        block_m: rows of x.
        block_rows: rows of the weight's tile.
        block_columns: columns of the weight's tile.
        warps: warps of the program.
        stages: pipeline stages.
    """

    block_m: int
    block_rows: int = 64
    block_columns: int = 64
    warps: int = 4
    stages: int = 3


def multiply(
    x: Float[Array, "m k"],
    codes: UInt8[Array, "g o packed"],
    scales: Float[Array, "g blocks_o blocks_i"],
    groups: Groups,
    layout: WeightLayout,
    transposed: bool,
    *,
    tile: GroupedQuantTile | None = None,
    interpret: bool = False,
) -> Float[Array, "m n"]:
    """Compute x W^T with the weight of each row's group, or x W if `transposed`.

    `layout` describes all weights as one matrix, (g * o, i).
    """
    m, (count, height, packed_width) = len(x), codes.shape
    tile = tile or GroupedQuantTile(m // len(groups.block_group))
    operands = kernel_operands(codes.reshape(count * height, packed_width), scales, None, layout)
    parts = layout.elements.packed
    width = layout.columns if transposed else height
    out = jax.ShapeDtypeStruct((m, width), x.dtype, manual_axis_type=jax.typeof(x).manual_axis_type)
    # Separate even and odd columns of x: the high bits of a byte multiply even columns, its low bits odd columns.
    arranged = x if transposed else x.reshape(m, -1, parts).transpose(2, 0, 1)
    call = triton_call(
        partial(_transposed_kernel if transposed else _kernel, layout=layout, tile=tile, height=height),
        grid=(len(groups.block_group), pl.cdiv(width, tile.block_columns if transposed else tile.block_rows)),
        in_specs=[whole_array_spec(groups.block_group), whole_array_spec(arranged), *map(whole_array_spec, operands)],
        out_specs=whole_array_spec(out),
        out_shape=out,
        num_warps=tile.warps,
        num_stages=tile.stages,
        interpret=interpret,
        name="grouped_quant_matmul" + "_transposed" * transposed,
    )
    with cost.flops(2 * x.size * width):
        return call(groups.block_group, arranged, *operands)


def _kernel(group_ref, x_ref, *refs, layout: WeightLayout, tile: GroupedQuantTile, height: int):
    *stored, out_ref = refs
    parts, _, width = x_ref.shape
    row, x_rows = span(pl.program_id(1), tile.block_rows), span(pl.program_id(0), tile.block_m)
    group = plgpu.load(group_ref.at[pl.program_id(0)])
    in_rows = row < height

    def step(k, total):
        stored_tile = read_tile(group * height + row, in_rows, k, stored, layout, tile.block_columns)
        byte = span(k, tile.block_columns // parts)
        for part, weight in enumerate(decode_tile(stored_tile, stored, layout, x_ref.dtype)):
            x = plgpu.load(x_ref.at[part, x_rows[:, None], byte[None, :]], mask=(byte < width)[None, :], other=0)
            total += plgpu.dot(weight, x.T)
        return total

    steps = _steps(group, height, stored, pl.cdiv(layout.columns, tile.block_columns))
    total = jax.lax.fori_loop(0, steps, step, jnp.zeros((tile.block_rows, tile.block_m), jnp.float32))
    plgpu.store(out_ref.at[x_rows[:, None], row[None, :]], total.T.astype(out_ref.dtype), mask=in_rows[None, :])


def _transposed_kernel(group_ref, dy_ref, *refs, layout: WeightLayout, tile: GroupedQuantTile, height: int):
    *stored, out_ref = refs
    parts, column_block = layout.elements.packed, pl.program_id(1)
    x_rows = span(pl.program_id(0), tile.block_m)
    group = plgpu.load(group_ref.at[pl.program_id(0)])

    def step(k, totals):
        row = span(k, tile.block_rows)
        in_rows = row < height
        stored_tile = read_tile(group * height + row, in_rows, column_block, stored, layout, tile.block_columns)
        dy = plgpu.load(dy_ref.at[x_rows[:, None], row[None, :]], mask=in_rows[None, :], other=0)
        weights = decode_tile(stored_tile, stored, layout, dy_ref.dtype)
        return tuple(total + plgpu.dot(dy, weight) for total, weight in zip(totals, weights))

    zeros = (jnp.zeros((tile.block_m, tile.block_columns // parts), jnp.float32),) * parts
    steps = _steps(group, height, stored, pl.cdiv(height, tile.block_rows))
    totals = jax.lax.fori_loop(0, steps, step, zeros)
    total = totals[0] if parts == 1 else jnp.stack(totals, axis=-1).reshape(tile.block_m, -1)
    column = span(column_block, tile.block_columns)
    mask = (column < out_ref.shape[1])[None, :]
    plgpu.store(out_ref.at[x_rows[:, None], column[None, :]], total.astype(out_ref.dtype), mask=mask)


def _steps(group: Array, height: int, stored, steps: int) -> Array:
    """Return the number of steps, which is 0 for a block without a group."""
    return (group * height < stored[0].shape[0]).astype(jnp.int32) * steps
