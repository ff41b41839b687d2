"""Dequantization by a Pallas-Triton kernel, for GPUs from sm_80 on: one read of codes and scales, one write."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, UInt8

from pallas_kernels.gpus import Capability, Device, current_device
from pallas_kernels.manual_axes import vary_over, varying_axes
from pallas_kernels.quant_matmul.layout import QuantRequest, WeightLayout, block_scales
from pallas_kernels.triton_call import plgpu, triton_call

AMPERE: Capability = (8, 0)
ADA: Capability = (8, 9)  # the first that converts float8_e4m3fn in one instruction
# Bytes of codes that a program reads, the most columns of its tile, and its warps: a thread stores 16 bytes at a time.
CODES, COLUMNS, WARPS = 2048, 512, 8


def refuses(device: Device, request: QuantRequest) -> str | None:
    """Return why this kernel cannot run a request on a device, or None."""
    if device.capability is None or device.capability < AMPERE:
        return "it needs an NVIDIA GPU of compute capability 8.0 or later"
    return None


def dequantize(
    codes: UInt8[Array, "o packed"],
    scales: Array,
    tensor_scale: Float[Array, ""] | None,
    layout: WeightLayout,
    dtype: DTypeLike,
    *,
    interpret: bool = False,
) -> Float[Array, "o i"]:
    """Return the dequantized weight.

    The kernel sees the weight as a list of rows of blocks, (o * i / c, c), with one scale each. This reshape costs
    nothing.
    """
    codes = codes.reshape(-1, layout.block_columns // layout.elements.packed)
    # Triton's arrays have powers of two as sizes; masks cut off the rest of a narrow block.
    columns = min(pl.next_power_of_2(codes.shape[1]), COLUMNS)
    rows = CODES // columns
    operands = kernel_operands(codes, scales, tensor_scale, layout)
    out = jax.ShapeDtypeStruct(
        (len(codes), layout.block_columns), dtype, manual_axis_type=jax.typeof(operands[0]).manual_axis_type
    )
    return triton_call(
        partial(_kernel, layout=layout, rows=rows, columns=columns),
        grid=(pl.cdiv(len(codes), rows), pl.cdiv(codes.shape[1], columns)),
        in_specs=[whole_array_spec(x) for x in operands],
        out_specs=whole_array_spec(out),
        out_shape=out,
        num_warps=WARPS,
        num_stages=1,
        interpret=interpret,
        name="dequantize",
    )(*operands).reshape(layout.rows, layout.columns)


def _kernel(codes_ref, scales_ref, tensor_scale_ref, *refs, layout: WeightLayout, rows: int, columns: int):
    *table, out_ref = refs
    row, column = span(pl.program_id(0), rows), span(pl.program_id(1), columns)
    in_rows, in_columns = row < codes_ref.shape[0], column < codes_ref.shape[1]
    # Each row of codes has its own scale, unless blocks have several rows of the weight and share it.
    scale_index = row
    if layout.block_rows > 1:
        # `row` counts rows of blocks, so it is (row of the weight) * blocks + (block in this row).
        blocks = layout.columns // layout.block_columns  # number of blocks in a row of the weight
        scale_index = jax.lax.div(row, blocks * layout.block_rows) * blocks + jax.lax.rem(row, blocks)
    scale = plgpu.load(scales_ref.at[scale_index], mask=in_rows, other=0)
    factor = block_scales(scale, tensor_scale_ref[0])[:, None]
    mask = in_rows[:, None] & in_columns[None, :]
    code = plgpu.load(codes_ref.at[row[:, None], column[None, :]], mask=mask, other=0)
    values = [(value * factor).astype(out_ref.dtype) for value in decode_bytes(code, layout, *table)]
    # Interleave the two values of each byte.
    value = values[0] if len(values) == 1 else jnp.stack(values, axis=-1).reshape(rows, -1)
    column = span(pl.program_id(1), value.shape[1])
    mask = in_rows[:, None] & (column < out_ref.shape[1])[None, :]
    plgpu.store(out_ref.at[row[:, None], column[None, :]], value, mask=mask)


def span(block: Array, size: int) -> Int[Array, " size"]:
    """Return the indices of a block along an axis."""
    return block * size + jnp.arange(size, dtype=jnp.int32)


def decode_bytes(code: UInt8[Array, "*tile"], layout: WeightLayout, *table) -> tuple[Float[Array, "*tile"], ...]:
    """Decode bytes to float32 values: one array, or one of the high and one of the low four bits.

    A table is read from memory: its 64 bytes are one line of the L1 cache, so a warp's 32 loads are one access. Fifteen
    selections per element would take longer than writing the weight.
    """
    elements, capability = layout.elements, current_device().capability
    if layout.kind == "e4m3" and capability is not None and capability >= ADA:
        return (jax.lax.bitcast_convert_type(code, jnp.float8_e4m3fn).astype(jnp.float32),)
    nibbles = (code,) if elements.bits == 8 else (code >> 4, code & 15)
    if elements.arithmetic is not None:
        return tuple(elements.arithmetic(nibble) for nibble in nibbles)
    return tuple(plgpu.load(table[0].at[nibble.astype(jnp.int32)]) for nibble in nibbles)


def kernel_operands(codes: Array, scales: Array, tensor_scale: Array | None, layout: WeightLayout) -> tuple[Array, ...]:
    """Return codes, flat scales, tensor_scale (1,), and the table of values if elements are looked up."""
    one = jnp.ones(1, jnp.float32) if tensor_scale is None else tensor_scale.reshape(1)
    table = () if layout.elements.arithmetic else (jnp.asarray(layout.elements.values, jnp.float32),)
    operands = (codes, scales.reshape(-1), one, *table)
    return vary_over(varying_axes(*operands), *operands)


def whole_array_spec(x: Array | jax.ShapeDtypeStruct) -> pl.BlockSpec:
    """Return a BlockSpec that gives every program the whole array; the program indexes its part."""
    return pl.BlockSpec(x.shape, lambda *program: (0,) * len(x.shape))
