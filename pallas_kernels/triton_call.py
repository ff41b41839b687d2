"""The one place through which every Triton kernel is called, and where its route to the GPU is chosen.

- By Pallas: Pallas lowers the kernel to Triton's IR. jax has deprecated this since 0.11 and will remove it.
- By the IR in the folder that the environment variable PALLAS_KERNELS_IR names (kept_ir.py). XLA compiles the same IR
  to the same code, and Pallas is not needed. A file that the folder lacks is written, if this jax has Pallas-Triton.

Kernels import `plgpu` from here, because a jax without Pallas-Triton has no such module.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.experimental import pallas as pl

from pallas_kernels import kept_ir
from pallas_kernels.manual_axes import vary_over, varying_axes

try:
    from jax.experimental.pallas import triton as plgpu
except ImportError:
    plgpu: Any = None

FOLDER = "PALLAS_KERNELS_IR"


def triton_call(
    kernel: Callable[..., None],
    out_shape: Any,
    *,
    grid: tuple[int, ...],
    in_specs: Sequence[pl.BlockSpec],
    out_specs: Any,
    num_warps: int,
    num_stages: int,
    interpret: bool,
    name: str,
    input_output_aliases: Mapping[int, int] | None = None,
) -> Callable[..., Any]:
    """Return a function that runs a kernel on arrays; the arguments are as in `pl.pallas_call`.

    The function raises `kept_ir.NoKernel` if this jax has no Pallas-Triton and the folder has no IR for the call.
    """
    aliases = dict(input_output_aliases or {})

    def by_pallas(*operands: jax.Array) -> Any:
        return pl.pallas_call(
            kernel,
            out_shape,
            grid=grid,
            in_specs=in_specs,
            out_specs=out_specs,
            input_output_aliases=aliases,
            compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=num_stages),
            interpret=interpret,
            name=name,
        )(*operands)

    def by_kept_ir(*operands: jax.Array) -> Any:
        call = kept_ir.describe_call(
            name, kernel, grid, operands, in_specs, out_shape, out_specs, aliases, num_warps, num_stages
        )
        attributes = kept_ir.find_or_make(
            Path(folder) if folder else None, call, by_pallas if plgpu else None, operands
        )
        # jax.ffi takes results that do not vary over a mesh, as which they are marked afterwards.
        results = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), out_shape)
        results = jax.ffi.ffi_call(kept_ir.TARGET, results, input_output_aliases=aliases)(*operands, **attributes)
        axes = varying_axes(*operands)
        return jax.tree.map(lambda x: vary_over(axes, x)[0], results)

    folder = os.environ.get(FOLDER)
    return by_pallas if plgpu and (interpret or not folder) else by_kept_ir
