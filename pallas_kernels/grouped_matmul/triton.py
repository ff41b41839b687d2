"""Grouped products as Pallas-Triton kernels, for GPUs from sm_80 on. Each program reads the group of its rows."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from pallas_kernels import cost
from pallas_kernels.gpus import Device
from pallas_kernels.grouped_matmul.groups import Groups
from pallas_kernels.triton_call import plgpu, triton_call


@dataclass(frozen=True)
class GroupedTile:
    """Block sizes of a program.

    Attributes:
        rows: rows of the program's result.
        columns: columns of the program's result.
        step: contracted elements per step of the loop.
        warps: warps of the program.
        stages: pipeline stages.
    """

    rows: int
    columns: int
    step: int
    warps: int = 4
    stages: int = 3

    @staticmethod
    def fitting(rows: int, columns: int, depth: int, block: int, itemsize: int) -> "GroupedTile":
        """Return the tile for a `rows` x `columns` result, contracted over `depth`, at most `block` per step.

        The tile is not larger than the result and has no more stages than steps, because the products of adapters are
        narrow. A step has 128 bytes, so that three stages fit into any GPU's shared memory. float32 results are
        narrower, so that the kernel does not spill.
        """
        step = _size(block, 128 // itemsize)
        return GroupedTile(_size(rows, 128), _size(columns, 256 // itemsize), step, stages=min(3, pl.cdiv(depth, step)))


def _size(extent: int, most: int) -> int:
    return min(most, max(16, pl.next_power_of_2(extent)))  # 16: the smallest size of a matrix instruction


def multiply(
    x: Float[Array, "m k"],
    weight: Float[Array, "g o i"],
    groups: Groups,
    transposed: bool,
    *,
    tile: GroupedTile | None = None,
    interpret: bool = False,
) -> Float[Array, "m n"]:
    """Compute x W^T with the weight of each row's group, or x W if `transposed`, accumulated in float32."""
    block = len(x) // len(groups.block_group)
    width = weight.shape[2 if transposed else 1]
    tile = tile or GroupedTile.fitting(block, width, x.shape[1], x.shape[1], x.dtype.itemsize)
    out = jax.ShapeDtypeStruct((len(x), width), x.dtype, manual_axis_type=jax.typeof(x).manual_axis_type)
    call = triton_call(
        partial(_kernel, tile=tile, transposed=transposed),
        # A program's rows are one block, so they have one group and one weight.
        grid=(len(groups.block_group), pl.cdiv(width, tile.columns)),
        in_specs=[_whole(groups.block_group), _whole(x), _whole(weight)],
        out_specs=_whole(out),
        out_shape=out,
        num_warps=tile.warps,
        num_stages=tile.stages,
        interpret=interpret,
        name="grouped_matmul" + "_transposed" * transposed,
    )
    with cost.flops(2 * x.size * width):
        return call(groups.block_group, x, weight)


def _kernel(group_ref, x_ref, weight_ref, out_ref, *, tile: GroupedTile, transposed: bool):
    block, (groups, *_), depth = pl.program_id(0), weight_ref.shape, x_ref.shape[1]
    row, column = _span(block, tile.rows), _span(pl.program_id(1), tile.columns)
    in_columns = column < out_ref.shape[1]
    group = plgpu.load(group_ref.at[block])

    def step(k, total):
        inner = _span(k, tile.step)
        in_depth = inner < depth
        # Both operands are masked along the depth: beyond it is other memory, and 0 times a NaN there would be NaN.
        x = plgpu.load(x_ref.at[row[:, None], inner[None, :]], mask=in_depth[None, :], other=0)
        if transposed:
            mask = in_depth[:, None] & in_columns[None, :]
            weight = plgpu.load(weight_ref.at[group, inner[:, None], column[None, :]], mask=mask, other=0)
        else:
            # A weight is (o, i) in memory: it is read in that order, i fastest, and transposed in the program.
            mask = in_columns[:, None] & in_depth[None, :]
            weight = plgpu.load(weight_ref.at[group, column[:, None], inner[None, :]], mask=mask, other=0).T
        return total + plgpu.dot(x, weight, precision=_precision(x))

    # A block without a group has no steps, so its result is zero.
    steps = (group < groups).astype(jnp.int32) * pl.cdiv(depth, tile.step)
    total = jax.lax.fori_loop(0, steps, step, jnp.zeros((tile.rows, tile.columns), jnp.float32))
    plgpu.store(out_ref.at[row[:, None], column[None, :]], total.astype(out_ref.dtype), mask=in_columns[None, :])


def outer(
    dy: Float[Array, "m o"],
    x: Float[Array, "m i"],
    groups: Groups,
    *,
    tile: GroupedTile | None = None,
    interpret: bool = False,
) -> Float[Array, "g o i"]:
    """Sum dy x^T over the rows of each group, accumulated in float32 in the order of the rows."""
    block = len(x) // len(groups.block_group)
    tile = tile or GroupedTile.fitting(dy.shape[1], x.shape[1], len(x), block, x.dtype.itemsize)
    shape = (len(groups.first) - 1, dy.shape[1], x.shape[1])
    out = jax.ShapeDtypeStruct(shape, x.dtype, manual_axis_type=jax.typeof(x).manual_axis_type)
    call = triton_call(
        # A step divides a block, so no step reads rows of two groups.
        partial(_outer_kernel, tile=tile, steps=block // tile.step),
        grid=(pl.cdiv(shape[1], tile.rows), pl.cdiv(shape[2], tile.columns), shape[0]),
        in_specs=[_whole(groups.first), _whole(dy), _whole(x)],
        out_specs=_whole(out),
        out_shape=out,
        num_warps=tile.warps,
        num_stages=tile.stages,
        interpret=interpret,
        name="grouped_outer",
    )
    with cost.flops(2 * x.size * dy.shape[1]):
        return call(groups.first, dy, x)


def _outer_kernel(first_ref, dy_ref, x_ref, out_ref, *, tile: GroupedTile, steps: int):
    row, column, group = _span(pl.program_id(0), tile.rows), _span(pl.program_id(1), tile.columns), pl.program_id(2)
    in_rows, in_columns = row < out_ref.shape[1], column < out_ref.shape[2]

    def step(k, total):
        inner = _span(k, tile.step)
        # Rows need no mask: groups have whole blocks, and rows without an item are zeros.
        dy = plgpu.load(dy_ref.at[inner[:, None], row[None, :]], mask=in_rows[None, :], other=0)
        x = plgpu.load(x_ref.at[inner[:, None], column[None, :]], mask=in_columns[None, :], other=0)
        return total + plgpu.dot(dy.T, x, precision=_precision(x))

    # The blocks of a group are contiguous, so the contraction runs over a range of rows.
    first, end = (plgpu.load(first_ref.at[group + n]) * steps for n in (0, 1))
    total = jax.lax.fori_loop(first, end, step, jnp.zeros((tile.rows, tile.columns), jnp.float32))
    mask = in_rows[:, None] & in_columns[None, :]
    plgpu.store(out_ref.at[group, row[:, None], column[None, :]], total.astype(out_ref.dtype), mask=mask)


def refuses(device: Device, request: jax.ShapeDtypeStruct) -> str | None:
    """Return why these kernels cannot multiply by a stack of this shape and dtype on a device, or None."""
    if device.capability is None or device.capability < (8, 0):
        return "it needs an NVIDIA GPU of compute capability 8.0 or later"
    if request.size >= 2**31:
        return f"the weights have {request.size} elements; fewer than 2^31 are supported"
    return None


def _precision(x: Array) -> jax.lax.Precision | None:
    return jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None  # keeps float32 from becoming TF32


def _span(block: Array, size: int) -> Int[Array, " size"]:
    return block * size + jnp.arange(size, dtype=jnp.int32)


def _whole(x: Array | jax.ShapeDtypeStruct) -> pl.BlockSpec:
    return pl.BlockSpec(x.shape, lambda *program: (0,) * len(x.shape))
