"""Triton's IR of kernels, kept in a folder, so that a jax without Pallas-Triton can compile them.

A file has the IR of one kernel for one call: its shapes, grid, tile and GPU. Its name has a digest of the call and the
source of this package. The IR is text: XLA of jax 0.12 reads the text that jax 0.10.2 wrote, but not its bytecode.
"""

import dataclasses
import enum
import hashlib
import json
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.gpus import Capability, current_device

TARGET = "__gpu$xla.gpu.triton"  # XLA's custom call, whose attributes are the IR and the launch
_NUMBERS = ("grid_x", "grid_y", "grid_z", "num_stages", "num_warps")


class NoKernel(RuntimeError):
    """This jax cannot lower a kernel, and the folder has no IR for the call; the message says how to make it.

    Attributes:
        kernel: name of the kernel.
        arrays: dtype and shape of the arrays that it reads and writes.
        capability: compute capability of the GPU.
    """

    def __init__(self, call: Mapping[str, Any], file: Path | None):
        """Take a call, as `describe_call` returns it, and its missing file; None without a folder."""
        self.kernel: str = call["name"]
        self.arrays = tuple((array["dtype"], tuple(array["shape"])) for array in call["arrays"])
        self.capability: Capability = call["capability"]
        arrays = ", ".join(f"{dtype}{list(shape)}" for dtype, shape in self.arrays)
        lacks = "PALLAS_KERNELS_IR names no folder" if file is None else f"there is no {file}"
        folder = "FOLDER" if file is None else file.parent
        super().__init__(
            f"kernel {self.kernel} of {arrays} cannot be compiled for a GPU of compute capability "
            f"{'.'.join(map(str, self.capability))}: jax {jax.__version__} has no Pallas-Triton, and {lacks}. "
            f"Install the same jaxtune in another environment with a jax that has it (pip install 'jaxtune[aot]' "
            f"'jax<0.13'), start the same run there, or `jaxtune plan` with the same options and --gpu, with "
            f"PALLAS_KERNELS_IR={folder}, which writes the kernels there, and then start again with the same variable"
        )


def describe_call(
    name: str,
    kernel: Callable[..., None],
    grid: tuple[int, ...],
    operands: Sequence[Any],
    in_specs: Sequence[Any],
    out_shape: Any,
    out_specs: Any,
    aliases: Mapping[int, int],
    num_warps: int,
    num_stages: int,
) -> dict[str, Any]:
    """Return everything on which a kernel's IR depends, as JSON that does not depend on the version of jax."""
    arrays = [*zip(operands, in_specs), *zip(jax.tree.leaves(out_shape), jax.tree.leaves(out_specs))]
    blocks = _outside(lambda: [_describe_block(spec, grid) for _, spec in arrays])
    return {
        "name": name,
        "capability": current_device().capability,
        "grid": list(grid),
        "num_warps": num_warps,
        "num_stages": num_stages,
        "aliases": sorted(aliases.items()),
        "matmul_precision": jax.config.values["jax_default_matmul_precision"],
        "arrays": [{"shape": list(x.shape), "dtype": x.dtype.name, **part} for (x, _), part in zip(arrays, blocks)],
        "kernel": _describe(kernel),
        "source": _source_digest(),
    }


def find_or_make(
    folder: Path | None, call: dict[str, Any], by_pallas: Callable[..., Any] | None, operands: Sequence[Any]
) -> dict[str, Any]:
    """Return the attributes of XLA's custom call for a described call, from the folder.

    A missing file is written if `by_pallas`, the same call by Pallas, is given. Otherwise NoKernel is raised.
    """
    digest = hashlib.sha256(json.dumps(call, sort_keys=True).encode()).hexdigest()[:20]
    file = None if folder is None else folder / f"{call['name']}-{digest}.json"
    if file is None or not (file.exists() or by_pallas):
        raise NoKernel(call, file)
    if not file.exists():
        assert by_pallas is not None
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands]
        _write(file, {"call": call, "jax": jax.__version__, **_lower(by_pallas, shapes)})
    kept = json.loads(file.read_text())
    numbers = {name: np.int32(kept[name]) for name in _NUMBERS}
    return {"name": kept["name"], "ir": "\n".join(kept["ir"]), "debug": False, **numbers}


def _write(file: Path, kept: dict[str, Any]) -> None:
    """Write a file at once, because several processes may write it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(f".{uuid.uuid4().hex}.part")
    part.write_text(json.dumps(kept, indent=1))
    part.replace(file)


# ---------------------------------------------------------------------------------------------------------------------
# Lowering


def _lower(by_pallas: Callable[..., Any], shapes: Sequence[jax.ShapeDtypeStruct]) -> dict[str, Any]:
    """Return the attributes of the custom call that Pallas makes of a call, the IR as lines."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    mesh = jax.sharding.AbstractMesh((1,), ("device",), (jax.sharding.AxisType.Explicit,), abstract_device=device)
    precision = jax.config.values["jax_default_matmul_precision"]

    def lower() -> Any:
        with jax.sharding.use_abstract_mesh(mesh), jax.default_matmul_precision(precision):
            return jax.jit(by_pallas).trace(*shapes).lower(lowering_platforms=("cuda",)).compiler_ir()

    module = _outside(lower)
    (call,) = (op for op in _operations(module.operation) if TARGET in str(op.attributes.get("call_target_name", "")))
    attributes = call.attributes["mhlo.backend_config"]
    text = _as_text(attributes["ir"].value_bytes)
    numbers = {name: attributes[name].value for name in _NUMBERS}
    return {"name": attributes["name"].value, **numbers, "ir": text.splitlines()}


def _outside(function: Callable[[], Any]) -> Any:
    """Call a function outside the mesh and the trace in use, which belong to a thread."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(function).result()


def _operations(operation: Any) -> Iterator[Any]:
    for region in operation.regions:
        for block in region:
            for inner in block:
                yield inner.operation
                yield from _operations(inner.operation)


def _as_text(bytecode: bytes) -> str:
    # Only a jax with Pallas-Triton comes here, and it has these modules.
    from jaxlib.mlir import ir
    from jaxlib.triton import dialect

    with ir.Context() as context:
        dialect.register_dialect(context)
        context.load_all_available_dialects()
        text: Any = ir.Module.parse(bytecode).operation.get_asm(enable_debug_info=False)
        return text


# ---------------------------------------------------------------------------------------------------------------------
# Description


@cache
def _source_digest() -> str:
    """A digest of this package's source, which decides what kernels compute."""
    digest = hashlib.sha256()
    root = Path(__file__).parent
    for file in sorted(root.rglob("*.py")):
        digest.update(str(file.relative_to(root)).encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:20]


def _describe_block(spec: Any, grid: tuple[int, ...]) -> dict[str, Any]:
    """The part of an array that a program sees: its shape, and its place for the first, next and last programs."""
    last = tuple(n - 1 for n in grid)
    programs = [(0,) * len(grid), *(tuple(int(i == axis) for i in range(len(grid))) for axis in range(len(grid))), last]
    places = [[int(index) for index in spec.index_map(*program)] for program in programs]
    return {"block": _describe(spec.block_shape), "places": places}


def _describe(value: Any) -> Any:
    """Return a static argument of a kernel as JSON: numbers, names, and fields of records."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, partial):
        arguments = {str(number): argument for number, argument in enumerate(value.args)} | value.keywords
        return {"function": _describe(value.func), **{name: _describe(arguments[name]) for name in sorted(arguments)}}
    if isinstance(value, np.dtype) or (isinstance(value, type) and hasattr(value, "dtype")):
        return jnp.dtype(value).name
    if callable(value) and hasattr(value, "__qualname__") and "<" not in value.__qualname__:
        return f"{value.__module__}.{value.__qualname__}"
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
    elif hasattr(value, "_fields"):
        names = value._fields
    elif isinstance(value, tuple | list):
        return [_describe(item) for item in value]
    elif type(value).__module__.startswith("pallas_kernels."):
        # Over which axes of a mesh the outputs vary is the caller's, not the kernel's.
        names = [name for name in sorted(vars(value)) if name != "varying"]
    else:
        raise TypeError(f"pallas_kernels.kept_ir: {value!r} cannot be described, so a kernel must not depend on it")
    return {"type": type(value).__name__, **{name: _describe(getattr(value, name)) for name in names}}
