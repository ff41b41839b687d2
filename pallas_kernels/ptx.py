"""Compiler figures of Pallas kernels: registers, spills, shared memory, matrix instructions, occupancy.

They are read from the folder into which XLA and Mosaic dumped PTX and launches, and from ptxas, which assembles the
PTX.
"""

import importlib.util
import math
import os
import re
import subprocess
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from pallas_kernels.gpus import Capability, Gpu


@dataclass(frozen=True)
class Kernel:
    """One Pallas kernel as it would run on the GPU.

    Attributes:
        name: the kernel's name.
        registers: registers per thread.
        spill_bytes: bytes of spill stores per thread.
        shared_memory: bytes per block, static and dynamic.
        grid: number of blocks in each dimension.
        threads: threads per block.
        mma_sync: `mma.sync` instructions in the PTX (as written, not as executed).
        wgmma: `wgmma.mma_async` instructions in the PTX.
        tcgen05: `tcgen05.mma` instructions in the PTX.
        exponentials: `ex2` instructions that a thread executes in one pass of the loop with the most `ex2`.
        occupancy: the fraction of a multiprocessor's warps that can be resident.
    """

    name: str
    registers: int
    spill_bytes: int
    shared_memory: int
    grid: tuple[int, int, int]
    threads: int
    mma_sync: int
    wgmma: int
    tcgen05: int
    exponentials: int
    occupancy: float


@cache
def ptxas() -> Path | None:
    """Return the assembler from NVIDIA's wheels; one from PATH would give different figures on different machines."""
    wheels = importlib.util.find_spec("nvidia")
    folders = list(wheels.submodule_search_locations or ()) if wheels else []
    places = (Path(folder, name, "bin", "ptxas") for folder in folders for name in ("cuda_nvcc", "cu13"))
    return next((place for place in places if place.exists()), None)


@dataclass(frozen=True)
class _Launch:
    grid: tuple[int, int, int]
    threads: int
    dynamic_shared_memory: int


def triton_kernels(hlo: str, folder: Path, gpu: Gpu) -> list[Kernel]:
    """Return the kernels that XLA compiled with Triton for `pallas_call`s, in the order of their first launch.

    XLA lists the launches, and distinguishes kernels with the same name by a suffix.
    """
    calls = re.findall(r'custom_call_target="__gpu\$xla\.gpu\.triton".*', hlo)
    wanted = {_find(r'[{ ]name = "(\w+)"', call) for call in calls}
    launches: dict[str, _Launch] = {}
    for sequence in folder.glob("*.thunk_sequence.txt"):
        pattern = r"kCustomKernel +\[.*\] (\S+) grid: \[(.*)\] threads: \[(.*)\] +shared_memory: (\d+)"
        for name, grid, threads, shared_memory in re.findall(pattern, sequence.read_text()):
            x, y, z = _integers(grid)
            launches[name] = _Launch((x, y, z), math.prod(_integers(threads)), int(shared_memory))
    assembly = {}
    for file in folder.glob("module_*.ptx"):
        if entry := re.search(r"\.entry (\w+)", ptx := file.read_text()):
            assembly[entry[1]] = ptx
    kernels = {name: launch for name, launch in launches.items() if re.sub(r"__\d+$", "", name) in wanted}
    if missing := wanted - {re.sub(r"__\d+$", "", name) for name in kernels if name in assembly}:
        raise RuntimeError(f"XLA dumped no PTX or launch of {', '.join(sorted(missing))}")
    return [_report(name, assembly[name], launch, gpu) for name, launch in kernels.items()]


# Mosaic compiles a kernel and dumps its PTX once per process, so PTX and launches are kept here, by the kernel's hash.
_mosaic_dumps: dict[tuple[str, Capability], tuple[str, _Launch]] = {}


def mosaic_kernels(hlo: str, folder: Path, gpu: Gpu) -> list[Kernel]:
    """Return the Mosaic GPU kernels that a module calls.

    Raises RuntimeError for a kernel that this process compiled before without dumping it.
    """
    names = {}
    for call in re.findall(r'custom_call_target="mosaic_gpu.*', hlo):
        kernel_hash = _find(r'kernel_hash = "((?:[^"\\]|\\.)*)"', call)
        names[kernel_hash, gpu.capability] = _find(r"\\[0-9A-F]{2}(?!stable_)(\w+)_mosaic_gpu\\00", call)
    dumped: dict[str, list[tuple[str, _Launch]]] = {}
    for ptx in sorted(folder.glob("*.ptx"), key=lambda file: file.stat().st_mtime_ns):
        if (host_code := ptx.with_suffix(".ll")).exists():
            name = re.sub(r"_\d+$", "", ptx.stem)
            dumped.setdefault(name, []).append((ptx.read_text(), _mosaic_launch(host_code.read_text())))
    for key, name in names.items():
        if key not in _mosaic_dumps:
            if not dumped.get(name):
                raise RuntimeError(f"Mosaic dumped no PTX of {name}: this process had compiled it before, without aot")
            _mosaic_dumps[key] = dumped[name].pop(0)
    return [_report(name, *_mosaic_dumps[key], gpu) for key, name in names.items()]


def _mosaic_launch(host_code: str) -> _Launch:
    """Read grid, cluster, block and shared memory from the host code: ten constants of the launch."""
    launch = r"@mosaic_gpu_(?:launch_kernel|build_kernel_spec)\(ptr %\w+, ((?:i32 \d+, ){9}i32 \d+)"
    figures = _integers(_find(launch, host_code).replace("i32", ""))
    return _Launch((figures[0], figures[1], figures[2]), math.prod(figures[6:9]), figures[9])


def _report(name: str, ptx: str, launch: _Launch, gpu: Gpu) -> Kernel:
    log = _assemble(ptx)
    registers = int(_find(r"Used (\d+) registers", log))
    static = re.search(r"(\d+) bytes smem", log)
    shared_memory = launch.dynamic_shared_memory + (int(static[1]) if static else 0)
    return Kernel(
        name=name,
        registers=registers,
        spill_bytes=int(_find(r"(\d+) bytes spill stores", log)),
        shared_memory=shared_memory,
        grid=launch.grid,
        threads=launch.threads,
        mma_sync=len(re.findall(r"\bmma\.sync", ptx)),
        wgmma=len(re.findall(r"\bwgmma\.mma_async", ptx)),
        tcgen05=len(re.findall(r"\btcgen05\.mma", ptx)),
        exponentials=_exponentials(ptx),
        occupancy=occupancy(registers, shared_memory, launch.threads, gpu),
    )


def _exponentials(ptx: str) -> int:
    """Return the largest number of `ex2` that one pass of a loop executes, not counting loops inside it."""
    # A loop reaches from a label to the last jump back to it. Attention has one loop for fully visible blocks and one
    # for the other blocks, so counting instructions of the whole kernel would count a block twice.
    labels = {label[1]: label.start() for label in re.finditer(r"^(\$L\w+):", ptx, re.MULTILINE)}
    jumps = [(labels[jump[1]], jump.start()) for jump in re.finditer(r"\bbra(?:\.uni)?\s+(\$L\w+);", ptx)]
    loops = [range(*loop) for loop in {label: jump for label, jump in jumps if label < jump}.items()]
    innermost = Counter()
    for ex2 in re.finditer(r"\bex2\.approx", ptx):
        enclosing = [loop for loop in loops if ex2.start() in loop]
        innermost.update([min(enclosing, key=len)] if enclosing else [])
    return max(innermost.values(), default=0)


@cache
def _assemble(ptx: str) -> str:
    """Assemble PTX and return the output of `ptxas -v`."""
    architecture = _find(r"\.target (\w+)", ptx)
    command = [str(ptxas()), "-v", f"-arch={architecture}", "-o", os.devnull, "/dev/stdin"]
    result = subprocess.run(command, input=ptx, capture_output=True, text=True)
    if result.returncode != 0:
        raise RuntimeError(f"ptxas cannot assemble a kernel for {architecture}:\n{result.stderr[-2000:]}")
    return result.stderr


def occupancy(registers: int, shared_memory: int, threads: int, gpu: Gpu) -> float:
    """Return resident warps / the most resident warps, by the allocation rules of NVIDIA's occupancy calculator.

    registers: registers per thread. shared_memory: bytes per block. threads: threads per block.
    """
    warps = math.ceil(threads / 32)
    most_warps = gpu.threads_per_multiprocessor // 32
    # Each of four schedulers has a quarter of the registers, and allocates them to warps in units of 256.
    warps_by_registers = 4 * (gpu.registers_per_multiprocessor // 4 // (math.ceil(registers * 32 / 256) * 256))
    blocks = min(
        gpu.blocks_per_multiprocessor,
        most_warps // warps,
        warps_by_registers // warps,
        # The system takes 1 KiB of each block's shared memory.
        gpu.shared_memory_per_multiprocessor // (math.ceil(shared_memory / 128) * 128 + 1024),
    )
    return blocks * warps / most_warps


def _find(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    if match is None:
        raise RuntimeError(f"nothing matches {pattern!r} in the compiler's output:\n{text[:500]}")
    return match[1]


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(figure) for figure in text.split(","))
