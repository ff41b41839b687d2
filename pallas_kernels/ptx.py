"""What the compiler made of Pallas kernels: registers, spills, shared memory, matrix instructions, occupancy.

Read from the folder in which XLA and Mosaic left PTX and launches, and from ptxas, which assembles the PTX.
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

    registers: per thread. spill_bytes: spill stores, per thread. shared_memory: bytes a block, static and dynamic.
    mma_sync, wgmma, tcgen05: matrix instructions in the PTX (not executed ones). exponentials: computed by a thread in
    one pass of the loop that has the most of them. occupancy: the fraction of a multiprocessor's warps that can be
    resident.
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
    """The assembler of NVIDIA's wheels: one found in PATH would give other figures on another machine."""
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
    """The kernels that XLA compiled by Triton for `pallas_call`s, in the order of their first launch.

    XLA lists the launches, and tells kernels of one name apart by a suffix.
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
        raise RuntimeError(f"XLA left no PTX or launch of {', '.join(sorted(missing))}")
    return [_report(name, assembly[name], launch, gpu) for name, launch in kernels.items()]


# Mosaic compiles a kernel, and leaves its PTX, once a process: PTX and launches by the kernel's hash.
_mosaic_left: dict[tuple[str, Capability], tuple[str, _Launch]] = {}


def mosaic_kernels(hlo: str, folder: Path, gpu: Gpu) -> list[Kernel]:
    """The Mosaic GPU kernels that a module calls. Raises RuntimeError for one that the process compiled elsewhere."""
    names = {}
    for call in re.findall(r'custom_call_target="mosaic_gpu.*', hlo):
        kernel_hash = _find(r'kernel_hash = "((?:[^"\\]|\\.)*)"', call)
        names[kernel_hash, gpu.capability] = _find(r"\\[0-9A-F]{2}(?!stable_)(\w+)_mosaic_gpu\\00", call)
    left: dict[str, list[tuple[str, _Launch]]] = {}
    for ptx in sorted(folder.glob("*.ptx"), key=lambda file: file.stat().st_mtime_ns):
        if (host_code := ptx.with_suffix(".ll")).exists():
            name = re.sub(r"_\d+$", "", ptx.stem)
            left.setdefault(name, []).append((ptx.read_text(), _mosaic_launch(host_code.read_text())))
    for key, name in names.items():
        if key not in _mosaic_left:
            if not left.get(name):
                raise RuntimeError(f"Mosaic left no PTX of {name}: this process had compiled it before, not by aot")
            _mosaic_left[key] = left[name].pop(0)
    return [_report(name, *_mosaic_left[key], gpu) for key, name in names.items()]


def _mosaic_launch(host_code: str) -> _Launch:
    """Grid, cluster, block and shared memory, ten constants in the code that launches."""
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
    """The most `ex2` that one pass of a loop executes, without those of loops inside it."""
    # A loop reaches from a label to the last jump back to it. Attention has one for the blocks that are wholly visible
    # and one for the others, so the instructions of the whole kernel would count a block twice.
    labels = {label[1]: label.start() for label in re.finditer(r"^(\$L\w+):", ptx, re.MULTILINE)}
    jumps = [(labels[jump[1]], jump.start()) for jump in re.finditer(r"\bbra(?:\.uni)?\s+(\$L\w+);", ptx)]
    loops = [range(*loop) for loop in {label: jump for label, jump in jumps if label < jump}.items()]
    innermost = Counter()
    for found in re.finditer(r"\bex2\.approx", ptx):
        around = [loop for loop in loops if found.start() in loop]
        innermost.update([min(around, key=len)] if around else [])
    return max(innermost.values(), default=0)


@cache
def _assemble(ptx: str) -> str:
    """What `ptxas -v` says of some PTX."""
    architecture = _find(r"\.target (\w+)", ptx)
    command = [str(ptxas()), "-v", f"-arch={architecture}", "-o", os.devnull, "/dev/stdin"]
    done = subprocess.run(command, input=ptx, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"ptxas cannot assemble a kernel for {architecture}:\n{done.stderr[-2000:]}")
    return done.stderr


def occupancy(registers: int, shared_memory: int, threads: int, gpu: Gpu) -> float:
    """Resident warps over the most there can be, by the allocation rules of NVIDIA's occupancy calculator.

    registers: per thread. shared_memory: bytes a block. threads: a block.
    """
    warps = math.ceil(threads / 32)
    most_warps = gpu.threads_per_multiprocessor // 32
    # Registers are dealt to warps in 256s, by each of four schedulers from its quarter of them.
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
    found = re.search(pattern, text)
    if found is None:
        raise RuntimeError(f"nothing matches {pattern!r} in what the compiler left:\n{text[:500]}")
    return found[1]


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(figure) for figure in text.split(","))
