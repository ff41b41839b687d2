"""Products of few rows with a quantized weight as Pallas-Triton kernels, which decode it tile by tile, in registers.

There is one kernel for x W^T and one for x W. The two elements of a byte are never interleaved: the high bits of the
bytes are multiplied by the even columns of x (or give the even columns of the result), the low bits by the odd columns.
If there are too few tiles to keep the GPU busy, the contraction is divided into `splits`, whose float32 sums are added
afterwards. No atomics are used, so every run gives the same result.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Int, UInt8

from pallas_kernels.gpus import Device
from pallas_kernels.quant_matmul import triton
from pallas_kernels.quant_matmul.layout import QuantRequest, WeightLayout, block_scales
from pallas_kernels.quant_matmul.tiles import PROGRAMS, QuantTile, tile_for
from pallas_kernels.quant_matmul.triton import decode_bytes, kernel_operands, span, whole_array_spec
from pallas_kernels.triton_call import plgpu, triton_call


def refuses(device: Device, request: QuantRequest) -> str | None:
    """Return why these kernels cannot run a request on a device, or None."""
    if request.dtype == jnp.float32:
        return "no matrix unit multiplies float32, and without one it is slower than dequantizing the whole weight"
    if not request.rows:
        return "x has no rows"
    return triton.refuses(device, request)


def multiply(
    x: Float[Array, "m k"],
    codes: UInt8[Array, "o packed"],
    scales: Array,
    tensor_scale: Float[Array, ""] | None,
    layout: WeightLayout,
    transposed: bool,
    *,
    tile: QuantTile | None = None,
    splits: int | None = None,
    interpret: bool = False,
) -> Float[Array, "m n"]:
    """Compute x W^T, or x W if `transposed`."""
    m, packed = len(x), layout.elements.packed
    tile = tile or tile_for(m)
    operands = kernel_operands(codes, scales, tensor_scale, layout)
    tiles, steps = pl.cdiv(layout.rows, tile.block_rows), pl.cdiv(layout.columns, tile.block_columns)
    if transposed:
        tiles, steps = steps, tiles
    else:
        # Separate even and odd columns of x: the high bits of a byte multiply even columns, its low bits odd columns.
        x = x.reshape(m, -1, packed).transpose(2, 0, 1)
    # Split the contraction until there are about PROGRAMS programs.
    blocks_m = pl.cdiv(m, tile.block_m)
    splits = splits or max(1, min(steps, PROGRAMS // (tiles * blocks_m)))
    width = layout.columns if transposed else layout.rows
    # Sums of splits stay float32, so that a result is rounded once.
    out = jax.ShapeDtypeStruct(
        (splits, m, width), x.dtype if splits == 1 else jnp.float32, manual_axis_type=jax.typeof(x).manual_axis_type
    )
    kernel = _transposed_kernel if transposed else _kernel
    out = triton_call(
        partial(kernel, layout=layout, tile=tile, steps=pl.cdiv(steps, splits)),
        grid=(tiles, blocks_m, splits),
        in_specs=[whole_array_spec(x), *map(whole_array_spec, operands)],
        out_specs=whole_array_spec(out),
        out_shape=out,
        num_warps=tile.warps,
        num_stages=1,
        interpret=interpret,
        name="quant_matmul" + "_transposed" * transposed,
    )(x, *operands)
    return out[0] if splits == 1 else jnp.sum(out, axis=0).astype(x.dtype)


def _kernel(x_ref, *refs, layout: WeightLayout, tile: QuantTile, steps: int):
    *stored, out_ref = refs
    parts, m, width = x_ref.shape
    first = pl.program_id(2) * steps
    x_rows, row = span(pl.program_id(1), tile.block_m), span(pl.program_id(0), tile.block_rows)

    def read(column_block):
        return read_tile(row, row < layout.rows, column_block, stored, layout, tile.block_columns)

    def step(k, carry):
        stored_tile, total = carry
        # Load the next tile before this one is multiplied, to hide the latency.
        next_tile = read(first + k + 1)
        # The tile that the last step loads is not used; its masks keep it inside the weight.
        byte = span(first + k, tile.block_columns // parts)
        mask = (x_rows < m)[:, None] & (byte < width)[None, :]
        for part, weight in enumerate(decode_tile(stored_tile, stored, layout, x_ref.dtype)):
            x = plgpu.load(x_ref.at[part, x_rows[:, None], byte[None, :]], mask=mask, other=0)
            total += plgpu.dot(weight, x.T)
        return next_tile, total

    zeros = jnp.zeros((tile.block_rows, tile.block_m), jnp.float32)
    _, total = jax.lax.fori_loop(0, steps, step, (read(first), zeros))
    _store(out_ref, x_rows, row, total.T)


def _transposed_kernel(x_ref, *refs, layout: WeightLayout, tile: QuantTile, steps: int):
    *stored, out_ref = refs
    m, height = x_ref.shape
    block, first = pl.program_id(0), pl.program_id(2) * steps
    x_rows = span(pl.program_id(1), tile.block_m)

    def read(row_block):
        row = span(row_block, tile.block_rows)
        return read_tile(row, row < layout.rows, block, stored, layout, tile.block_columns)

    def step(k, carry):
        stored_tile, totals = carry
        next_tile = read(first + k + 1)
        row = span(first + k, tile.block_rows)
        mask = (x_rows < m)[:, None] & (row < height)[None, :]
        x = plgpu.load(x_ref.at[x_rows[:, None], row[None, :]], mask=mask, other=0)
        weights = decode_tile(stored_tile, stored, layout, x_ref.dtype)
        return next_tile, tuple(total + plgpu.dot(x, weight) for total, weight in zip(totals, weights))

    parts = layout.elements.packed
    zeros = (jnp.zeros((tile.block_m, tile.block_columns // parts), jnp.float32),) * parts
    _, totals = jax.lax.fori_loop(0, steps, step, (read(first), zeros))
    # Each part has every second column of the result; they interleave once, after the loop.
    total = totals[0] if parts == 1 else jnp.stack(totals, axis=-1).reshape(tile.block_m, -1)
    _store(out_ref, x_rows, span(block, tile.block_columns), total)


def read_tile(
    row: Int[Array, " r"], in_rows: Bool[Array, " r"], column_block: Array, stored, layout: WeightLayout, columns: int
) -> tuple[Array, Array]:
    """Load codes and scales of rows of a weight, in a block of `columns` columns.

    Rows that are not `in_rows`, and elements beyond the weight, are zeros. stored: refs of `kernel_operands`.
    """
    codes_ref, scales_ref, *_ = stored
    byte = span(column_block, columns // layout.elements.packed)
    # Code 0 is -1 in NF4: elements beyond the weight are zero because their scales are, not because of their codes.
    in_weight = in_rows[:, None] & (byte < codes_ref.shape[1])[None, :]
    code = plgpu.load(codes_ref.at[row[:, None], byte[None, :]], mask=in_weight, other=0)
    blocks = layout.columns // layout.block_columns
    scale_row = jax.lax.div(row, layout.block_rows) * blocks
    if layout.block_columns % columns == 0:  # one scale per row of the tile
        column = jax.lax.div(column_block * columns, layout.block_columns)
        return code, plgpu.load(scales_ref.at[scale_row + column], mask=in_rows & (column < blocks), other=0)
    # A row of the tile has several scales: load the scale of each byte.
    column = jax.lax.div(byte, layout.block_columns // layout.elements.packed)
    return code, plgpu.load(scales_ref.at[scale_row[:, None] + column[None, :]], mask=in_weight, other=0)


def decode_tile(held: tuple[Array, Array], stored, layout: WeightLayout, dtype) -> tuple[Array, ...]:
    """Decode the tile of `read_tile`: one array (rows, bytes), or one of the high and one of the low four bits."""
    _, _, tensor_scale_ref, *table = stored
    code, scale = held
    factor = block_scales(scale, tensor_scale_ref[0])
    factor = factor if factor.ndim == 2 else factor[:, None]
    return tuple((value * factor).astype(dtype) for value in decode_bytes(code, layout, *table))


def _store(out_ref, row, column, value) -> None:
    mask = (row < out_ref.shape[1])[:, None] & (column < out_ref.shape[2])[None, :]
    plgpu.store(out_ref.at[pl.program_id(2), row[:, None], column[None, :]], value.astype(out_ref.dtype), mask=mask)
