"""Compile for NVIDIA GPUs that this machine lacks, one or many over several hosts, and read the compiler's output.

Memory and collectives are XLA's own figures for that GPU; the report of a kernel comes from its PTX, assembled by
ptxas. Choices that XLA makes by timing on the GPU (cuBLAS algorithms) stay at their defaults. No device is opened.
"""

import importlib.metadata
import importlib.util
import math
import os
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from pallas_kernels.cost import read_scratch
from pallas_kernels.gpus import GPUS, Gpu
from pallas_kernels.ptx import Kernel, mosaic_kernels, ptxas, triton_kernels

__all__ = ["COLLECTIVES", "Compiled", "CompiledMemory", "Kernel", "compile_for", "devices", "memory_of", "unavailable"]

COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "ragged-all-to-all", "reduce-scatter")


@dataclass(frozen=True)
class CompiledMemory:
    """Bytes on each device, and on its host.

    On compile-only devices jax keeps an argument's memory kind only if its sharding uses the mesh's abstract mesh.

    Attributes:
        arguments: bytes of arguments.
        outputs: bytes of outputs, aliased ones included.
        aliased: bytes of outputs that reuse the buffers of donated arguments.
        temporaries: bytes of temporaries, with the scratch memory of foreign kernels.
        peak: peak memory of the device.
        host: bytes in the host's memory.
    """

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    peak: int
    host: int


@dataclass(frozen=True)
class Compiled:
    """A function compiled for one kind of GPU.

    Attributes:
        memory: bytes on each device and on its host.
        collectives: kind -> (instructions, bytes of their results on a device); an instruction in a loop counts once.
        custom_calls: target -> instructions.
        kernels: the Pallas kernels.
        hlo: text of the optimised module of one device.
        thunks: XLA's dump of the launches and CUDA graphs, in the order in which they run.
    """

    memory: CompiledMemory
    collectives: dict[str, tuple[int, int]]
    custom_calls: dict[str, int]
    kernels: tuple[Kernel, ...]
    hlo: str
    thunks: str


def unavailable() -> str | None:
    """Return why nothing can be compiled for a GPU on this machine, or None if it can."""
    plugin = next((name for name in _PLUGINS if importlib.util.find_spec(name)), None)
    if plugin is None:
        return "jax's CUDA plugin is not installed: pip install 'jaxtune[aot]'"
    jaxlib, version = importlib.metadata.version("jaxlib"), importlib.metadata.version(plugin)
    if version != jaxlib:
        return f"{plugin} {version} does not fit jaxlib {jaxlib}: pip install 'jaxtune[aot]' '{plugin}=={jaxlib}'"
    if ptxas() is None:
        return "ptxas is not installed: pip install 'jaxtune[aot]'"
    return None


def devices(gpu: str, hosts: int = 1, per_host: int = 1) -> list[Any]:
    """Return compile-only `jax.Device`s of one kind, from which a mesh can be made as from any others.

    Raises RuntimeError if the `aot` extra is not installed, ValueError for a GPU that is not in `gpus.GPUS`.
    """
    if reason := unavailable():
        raise RuntimeError(f"pallas_kernels.aot: {reason}")
    if gpu not in GPUS:
        raise ValueError(f"pallas_kernels.aot: unknown GPU {gpu!r}; choose from {', '.join(GPUS)}")
    target = _target_config(GPUS[gpu])
    return topologies.get_topology_desc(gpu, "cuda", target_config=target, topology=f"1x{hosts}x{per_host}").devices


def compile_for(
    gpu: str,
    function: Callable[..., Any],
    *arguments: Any,
    hosts: int = 1,
    per_host: int = 1,
    mesh: Mesh | None = None,
    **jit_options: Any,
) -> Compiled:
    """Compile `jax.jit(function, **jit_options)` for a GPU, and report the compiler's output.

    mesh: a mesh of `devices(gpu, ...)`; without one, a single axis of `hosts` x `per_host` GPUs is made.
    arguments: pytrees of anything with a shape and a dtype. A leaf with a NamedSharding is laid out by its spec, any
    other leaf is replicated.

    Raises the errors of `devices`, and jax's own error for a program that the GPU cannot run (for example, a kernel
    that requests more shared memory than a block may have).
    """
    if mesh is None:
        mesh = Mesh(np.array(devices(gpu, hosts, per_host)), ("devices",), axis_types=(AxisType.Explicit,))
    if mesh.devices.flat[0].device_kind != GPUS[gpu].target:
        raise ValueError(f"pallas_kernels.aot: a mesh of {mesh.devices.flat[0].device_kind}, not of {GPUS[gpu].target}")

    def abstract(leaf):
        given = getattr(leaf, "sharding", None)
        if not isinstance(given, NamedSharding):
            sharding = NamedSharding(mesh, PartitionSpec())
        elif given.memory_kind in (None, "device"):
            sharding = NamedSharding(mesh, given.spec)
        else:  # the abstract mesh, because a sharding over compile-only devices would lose the memory kind
            sharding = NamedSharding(mesh.abstract_mesh, given.spec, memory_kind=given.memory_kind)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    arguments = jax.tree.map(abstract, arguments)
    jitted = jax.jit(function, **jit_options) if jit_options or not hasattr(function, "lower") else function
    with tempfile.TemporaryDirectory(prefix="pallas_kernels_aot_") as folder, jax.set_mesh(mesh):
        with _environment(folder), _without_persistent_cache():
            compiled = jitted.lower(*arguments).compile(
                compiler_options={"xla_dump_to": folder, "xla_dump_emitter_re": "ptx"}
            )
        hlo = compiled.as_text() or ""
        kernels = triton_kernels(hlo, Path(folder), GPUS[gpu]) + mosaic_kernels(hlo, Path(folder), GPUS[gpu])
        thunks = dumped_thunks(Path(folder))
    return Compiled(
        memory_of(compiled),
        _collectives(hlo),
        dict(Counter(re.findall(r' custom-call\(.*?custom_call_target="([^"]+)"', hlo))),
        tuple(kernels),
        hlo,
        thunks,
    )


def dumped_thunks(folder: Path) -> str:
    """Return the text of the thunk sequence that XLA dumped (`xla_dump_to`) when it compiled a module for a GPU.

    XLA writes a second file after its thunk passes if one of the passes changed something; without CUDA graphs none
    does.
    """
    for name in ("thunk_sequence_after_thunk_passes", "thunk_sequence"):
        if files := sorted(folder.glob(f"*.{name}.txt")):
            return "".join(file.read_text() for file in files)
    return ""


_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")


def _target_config(gpu: Gpu) -> str:
    """Return XLA's GpuTargetConfigProto for a GPU, in text form."""
    major, minor = gpu.capability
    # From Hopper on, the instructions of the matrix units exist only on one architecture (sm_90a).
    features = "ACCELERATED_FEATURES" if major >= 9 else "NONE"
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024  threads_per_warp: 32
  shared_memory_per_block: 49152  shared_memory_per_core: {gpu.shared_memory_per_multiprocessor}
  shared_memory_per_block_optin: {gpu.shared_memory_per_block}
  threads_per_core_limit: {gpu.threads_per_multiprocessor}  core_count: {gpu.multiprocessors}  fpus_per_core: 128
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  thread_dim_limit_x: 1024  thread_dim_limit_y: 1024  thread_dim_limit_z: 64
  registers_per_core_limit: {gpu.registers_per_multiprocessor}  registers_per_block_limit: 65536
  memory_bandwidth: {gpu.memory_bandwidth}  l2_cache_size: {gpu.l2_cache}  clock_rate_ghz: {gpu.clock / 1e9}
  device_memory_size: {gpu.memory}
  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {features} }}
  device_vendor: "NVIDIA Corporation"  name: "{gpu.target}"  device_address_bits: 64
  driver_version: "13.0.0"  runtime_version: "12.9.0"  compile_time_toolkit_version: "12.9.0"  dnn_version: "9.10.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{gpu.target}"
"""


@contextmanager
def _environment(folder: str) -> Iterator[None]:
    """Set the variables that Mosaic reads when it compiles: the dump folder, and PATH, by which it finds ptxas.

    Mosaic writes PTX for the version of the ptxas that it finds.
    """
    path = os.pathsep.join((os.path.dirname(ptxas() or ""), os.environ.get("PATH", os.defpath)))
    values = {"MOSAIC_GPU_DUMP_TO": folder, "MOSAIC_GPU_DUMP_HOST_LLVM": "1", "PATH": path}
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def _without_persistent_cache() -> Iterator[None]:
    """Turn off jax's persistent cache: an executable for an absent device can be written to it but not read back."""
    folder = jax.config.values["jax_compilation_cache_dir"]
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update("jax_compilation_cache_dir", folder)
        compilation_cache.reset_cache()


def memory_of(compiled: jax.stages.Compiled) -> CompiledMemory:
    """Return the memory of a compiled function on a device: XLA's figures plus the scratch memory of its kernels."""
    stats: Any = compiled.memory_analysis()
    scratch = read_scratch(compiled.as_text() or "")
    temporaries = stats.temp_size_in_bytes + scratch
    host = (
        stats.host_argument_size_in_bytes
        + stats.host_output_size_in_bytes
        - stats.host_alias_size_in_bytes
        + stats.host_temp_size_in_bytes
    )
    # If some buffers are on the host, XLA's peak counts them too: use the sum of all buffers on the device instead.
    new_outputs = stats.output_size_in_bytes - stats.alias_size_in_bytes
    total = stats.argument_size_in_bytes + new_outputs + temporaries
    return CompiledMemory(
        arguments=stats.argument_size_in_bytes,
        outputs=stats.output_size_in_bytes,
        aliased=stats.alias_size_in_bytes,
        temporaries=temporaries,
        peak=total if host else stats.peak_memory_in_bytes + scratch,
        host=host,
    )


def _collectives(hlo: str) -> dict[str, tuple[int, int]]:
    totals: dict[str, tuple[int, int]] = {}
    kinds = "|".join(COLLECTIVES)
    # An asynchronous collective is counted by its start instruction.
    for shape, kind, start in re.findall(rf"^ *(?:ROOT )?%\S+ = (.+?) ({kinds})(-start)?\(", hlo, re.MULTILINE):
        sizes = [_bytes(*array) for array in re.findall(r"\b([a-z]+\d\w*|pred)\[([\d,]*)\]", shape)]
        if start and kind != "all-reduce":
            # The shape is (operands, results); a collective-permute has two synchronisation counters after them.
            sizes = sizes[:2] if kind == "collective-permute" else sizes
            sizes = sizes[len(sizes) // 2 :]
        count, total = totals.get(kind, (0, 0))
        totals[kind] = count + 1, total + sum(sizes)
    return totals


def _bytes(dtype: str, shape: str) -> int:
    # The bits are the digits of the name up to the exponent: 16 of bf16, 8 of f8e4m3fn.
    bits = 8 if dtype == "pred" else int("".join(filter(str.isdigit, dtype.partition("e")[0])))
    return math.ceil(math.prod(int(size) for size in shape.split(",") if size) * bits / 8)
