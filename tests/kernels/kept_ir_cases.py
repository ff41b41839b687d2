"""Lower kernels for a GPU by the IR in a folder, or by Pallas, without a compiler for GPUs."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from pallas_kernels import kept_ir, triton_call
from pallas_kernels.gpus import GPUS


@contextmanager
def kernels_from(folder: Path | None, pallas: bool = True) -> Iterator[None]:
    """Take kernels from a folder, or by Pallas if it is None; `pallas=False`: as if jax had no Pallas-Triton."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(triton_call.FOLDER, raising=False)
        if folder is not None:
            patch.setenv(triton_call.FOLDER, str(folder))
        if not pallas:
            patch.setitem(sys.modules, "jax._src.pallas.triton", None)
            patch.setattr(triton_call, "plgpu", None)
        jax.clear_caches()  # what was traced before
        yield
    jax.clear_caches()


def lowered(function, *arguments, gpu="h100", devices=1):
    """Return the attributes of XLA's Triton calls in a function that is lowered for a mesh of one kind of GPU."""
    device = AbstractDevice(device_kind=GPUS[gpu].target, num_cores=None, platform="gpu")
    mesh = AbstractMesh((devices,), ("devices",), (AxisType.Explicit,), abstract_device=device)
    # The shapes of a case belong to the mesh that was set when its module was imported, if another test had set one.
    arguments = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arguments)
    with jax.sharding.use_abstract_mesh(mesh):
        module: Any = jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).compiler_ir()
    calls = []
    for call in kept_ir._operations(module.operation):
        if kept_ir.TARGET in str(call.attributes.get("call_target_name", "")):
            attributes = call.attributes["mhlo.backend_config"]
            ir = attributes["ir"].value_bytes
            text = kept_ir._as_text(ir) if ir.startswith(b"ML") else ir.decode()
            numbers = {name: attributes[name].value for name in ("name", *kept_ir._NUMBERS)}
            types = [str(result.type) for result in call.results]
            aliases = str(call.attributes["output_operand_aliases"])
            calls.append(numbers | {"ir": text.strip(), "aliases": aliases, "types": types})
    return calls
