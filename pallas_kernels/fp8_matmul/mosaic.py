"""FP8 with scales in blocks for Hopper (sm_90a) in Pallas Mosaic GPU, as DeepSeek-V3 multiplies (arXiv:2412.19437).

Hopper's tensor cores accumulate FP8 products in fewer bits than float32 (section 3.5.2 of that paper). So every 128
elements of k start a new sum, which is scaled and then added to a sum in float32 registers.

A program computes a 128 x 128 tile of the result with three warpgroups: one streams blocks into shared memory by TMA;
the other two, the workers, hold 64 rows each and multiply by wgmma.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.fp8_matmul.request import BLOCK, Fp8Request
from pallas_kernels.gpus import Device
from pallas_kernels.manual_axes import vary_over, varying_axes
from pallas_kernels.warpgroups import PER_ROW, ROWS, WORKERS, Ring, as_memory, as_worker, load, zeros

# Pairs of a block of x and a block of the weight in flight, 32 KiB per pair.
STAGES = 4


def refuses(device: Device, request: Fp8Request) -> str | None:
    """Return why the kernel cannot run a request on a Hopper GPU, or None."""
    if request.x_dtype == jnp.float8_e5m2 and jax.__version_info__ < (0, 11):
        return f"Mosaic GPU multiplies e5m2 by e4m3 from jax 0.11 on; this is jax {jax.__version__}"
    if request.columns % BLOCK or request.depth % BLOCK:
        return f"weight sizes must be multiples of {BLOCK}, not {request.columns} x {request.depth}"
    scale_shapes = (request.rows, request.depth // BLOCK), (request.columns // BLOCK, request.depth // BLOCK)
    if (request.x_scales, request.weight_scales) != scale_shapes:
        return (
            f"it needs a scale for each 1 x {BLOCK} of x and each {BLOCK} x {BLOCK} of the weight, of shapes "
            f"{scale_shapes[0]} and {scale_shapes[1]}, not {request.x_scales} and {request.weight_scales}"
        )
    return None


def multiply(
    x: Float[Array, "m k"],
    weight: Float[Array, "n k"],
    x_scale: Float[Array, "m k_blocks"],
    weight_scale: Float[Array, "n_blocks k_blocks"],
    request: Fp8Request,
    *,
    interpret: bool = False,
) -> Float[Array, "m n"]:
    """Compute x W^T. `interpret` runs the kernel in jax's interpreter on a CPU (jax 0.12 or later)."""
    axes = varying_axes(x, weight, x_scale, weight_scale)
    x, weight, x_scale, weight_scale = vary_over(axes, x, weight, x_scale, weight_scale)
    padding = (0, -request.rows % (WORKERS * ROWS)), (0, 0)
    # Transposed, so that the scales of a block of rows are contiguous.
    x, x_scales = jnp.pad(x, padding), jnp.pad(x_scale, padding).T
    options = {}
    if interpret:
        # In this interpreter, memory starts as NaN and a race is an error.
        options["interpret"] = plgpu.InterpretGPUParams(detect_races=True)  # pyright: ignore[reportAttributeAccessIssue]
    launch = plgpu.kernel(
        partial(_kernel, interpret=interpret),
        kernel_name="fp8_matmul",
        out_type=jax.ShapeDtypeStruct((x.shape[0], request.columns), request.dtype),
        grid=(request.columns // BLOCK, x.shape[0] // (WORKERS * ROWS)),
        grid_names=("column", "row"),
        num_threads=WORKERS + 1,
        thread_name="warpgroup",
        scratch_types={
            "tile": _matrices(WORKERS, ROWS, request.dtype),
            "blocks": Ring.scratch(
                STAGES,
                _matrices(STAGES, WORKERS * ROWS, x.dtype),
                _matrices(STAGES, BLOCK, weight.dtype),
                plgpu.SMEM((STAGES, WORKERS * ROWS), jnp.float32),
            ),
        },
        **options,
    )
    out = launch(x, weight, x_scales, weight_scale)[: request.rows]
    # Inside a shard_map, Mosaic's outputs lack the mesh axes over which they vary.
    return jax.lax.pcast(out, tuple(axes), to="varying") if axes else out


def _kernel(x_ref, weight_ref, x_scales_ref, weight_scales_ref, out_ref, *, tile, blocks, interpret):
    row, column = jax.lax.axis_index("row"), jax.lax.axis_index("column")
    rows = pl.ds(row * (WORKERS * ROWS), WORKERS * ROWS)
    columns, steps = pl.ds(column * BLOCK, BLOCK), x_scales_ref.shape[0]
    blocks = Ring(*blocks)

    @as_worker
    def _(worker):
        worker_rows = pl.ds(worker * ROWS, ROWS)

        def add_block(step, total):
            weight_scale = weight_scales_ref[column, step]
            x, weight, x_scales = blocks.take(step)
            scales = load(x_scales.at[worker_rows], PER_ROW) * weight_scale
            if interpret:
                # In the interpreter plain loads, unlike wgmma's, race with the TMA copy that fills the slot next.
                plgpu.commit_smem()
            product = _product(x.at[worker_rows], weight.transpose((1, 0)))
            blocks.release(step)
            return total + product * jax.lax.broadcast_in_dim(scales, product.shape, [0])

        total = jax.lax.fori_loop(0, steps, add_block, zeros(ROWS, BLOCK))
        tile[worker] = total.astype(tile.dtype)
        plgpu.commit_smem()
        out_rows = pl.ds((row * WORKERS + worker) * ROWS, ROWS)
        plgpu.copy_smem_to_gmem(tile.at[worker], out_ref.at[out_rows, columns])
        plgpu.wait_smem_to_gmem(0)

    @as_memory
    def _():
        @pl.loop(0, steps)
        def _(step):
            depth = pl.ds(step * BLOCK, BLOCK)
            blocks.fill(step, x_ref.at[rows, depth], weight_ref.at[columns, depth], x_scales_ref.at[step, rows])


def _product(a, b):
    """Compute a b of a block in a new accumulator."""

    def body(accumulator):
        plgpu.wgmma(accumulator, a, b)
        return accumulator[...]

    return pl.run_scoped(body, plgpu.ACC((a.shape[0], b.shape[1]), jnp.float32))  # pyright: ignore[reportPrivateImportUsage]


def _matrices(count: int, rows: int, dtype: Any):
    """Return shared memory for `count` matrices of `rows` rows of BLOCK elements, in tiles of 8 rows of 128 bytes."""
    elements = 128 // jnp.dtype(dtype).itemsize
    transforms = (plgpu.TilingTransform((8, elements)), plgpu.SwizzleTransform(128))
    return plgpu.SMEM((count, rows, BLOCK), dtype, transforms=transforms)
