"""Check that a run fits: its memory need, from shapes and the compiled step, against the device's and the host's.

A run whose state does not fit is refused before its data is read or a weight is allocated. A run whose step does not
fit is refused after compilation. The message lists options that would help and the memory that each would need.
"""

import contextlib
import dataclasses
import logging
import math
import re
import resource
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxtune.config import checks
from jaxtune.config.schema import Config
from jaxtune.errors import UserError, format_bytes
from jaxtune.models.forward_options import Remat
from jaxtune.parallel.offload import is_on_host
from jaxtune.parallel.options import MemoryOptions
from jaxtune.training.assembly import Program, assemble, compile_step
from pallas_kernels.aot import CompiledMemory, memory_of
from pallas_kernels.gpus import current_device

log = logging.getLogger("jaxtune")
CLOSE = 0.9  # fraction of the limit above which a need causes a warning
# In order of falling device memory: each policy recomputes or moves more than the one before it.
POLICIES: tuple[Remat, ...] = ("none", "dots", "block", "offload")
# The most weights of a model whose layers are unrolled if memory.unroll is unset. On an H200 a step of 0.6B took 16%
# less time unrolled, and 18 s more to compile (benchmarks/results/nvidia_h200.json, step_choices). With more weights
# products are a larger part of the step.
UNROLLED_WEIGHTS = 2_000_000_000
# Host memory that compiler, threads and libraries will take in a process that has compiled nothing yet, in bytes.
# Measured with jax 0.10 on a tiny model: it ran with 248 MB left, and the kernel killed it with 198 MB left.
PROCESS = 240_000_000


@dataclass(frozen=True)
class Need:
    """The memory that a process needs on each of its devices and on the host, in bytes.

    Attributes:
        devices: Number of the process's devices.
        state: On each device: parameters, optimizer state and a batch, and weights of a teacher.
        temporaries: On each device: temporaries of the step.
        saved: On the host: a checkpoint's copy of the trained state of all the process's devices.
        offloaded: On the host: arrays that memory.offload_* and memory.remat='offload' move there from all devices.
        process: On the host: the process itself.
    """

    devices: int
    state: int
    temporaries: int
    saved: int
    offloaded: int
    process: int

    @property
    def host(self) -> int:
        """Total need on the host, without the memory of simulated devices."""
        return self.saved + self.offloaded + self.process

    @property
    def device(self) -> int:
        """Total need on a device."""
        return self.state + self.temporaries


@dataclass(frozen=True, order=True)
class Limit:
    """The available bytes, and the name of the device or setting that limits them."""

    size: int
    name: str


def check_state(config: Config, program: Program, mesh: jax.sharding.Mesh, held: int) -> None:
    """Check the memory of parameters, optimizer state, a batch, and `held` bytes of other weights on each device.

    Raises UserError if it does not fit.
    """

    def need(other: Config) -> Need:
        return need_of(assemble(program.model.base, other, mesh), len(mesh.local_devices), held=held)

    _judge(config, need_of(program, len(mesh.local_devices), held=held), need)


def variants(config: Config, program: Program, platform: str, devices: int) -> tuple[Config, ...]:
    """Return the config with what memory.remat='auto' and an unset memory.unroll may mean.

    A run takes the first whose step fits. `devices`: the number of all its devices.
    """
    chosen = config.memory.remat
    # On CPUs XLA's code is faster with 'block' than without rematerialisation, because it reads and writes less memory.
    policies = (chosen,) if chosen != "auto" else POLICIES if platform == "gpu" else ("block",)
    in_loops = tuple(_with_memory(config, remat=remat) for remat in policies)
    weights = sum(math.prod(parameter.shape) for parameter in program.model.parameters.values())
    small = platform == "gpu" and devices == 1 and weights <= UNROLLED_WEIGHTS
    gains = small and policies[0] == "none" and config.precision.recipe in ("bf16", "fp16", "fp32")
    if config.memory.unroll is not None or not gains:
        return in_loops
    return _with_memory(in_loops[0], unroll=True), *in_loops


def continuing(allowed: tuple[Config, ...], before: Mapping[str, Any]) -> tuple[Config, ...]:
    """Return the variants that need no more memory than the one of a resumed run, whose "remat" and "unroll" are given.

    Checkpoints of older versions have no "unroll": layers were in loops, unless the user said otherwise, as now.
    """
    policies = [one.memory.remat for one in allowed]
    if before.get("remat") not in policies:
        return allowed
    allowed = allowed[policies.index(before["remat"]) :]
    looped = [one for one in allowed if not one.memory.unroll]
    return allowed if before.get("unroll") or not looped else tuple(looped)


def warn_changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Warn if a resumed run rounds differently: "remat" or "unroll" differ between its checkpoint and now."""
    for name in now:
        if name in before and before[name] != now[name]:
            log.warning(
                "memory.%s was %r and is %r now: losses round differently from here on", name, before[name], now[name]
            )


def _with_memory(config: Config, **options: Any) -> Config:
    return dataclasses.replace(config, memory=dataclasses.replace(config.memory, **options))


def compile_fitting_step(
    config: Config, program: Program, mesh: jax.sharding.Mesh, before: Mapping[str, Any], held: int = 0
) -> tuple[Program, jax.stages.Compiled, MemoryOptions]:
    """Compile the step of the config or, if it leaves memory.remat or memory.unroll open, the first that fits.

    If every variant comes close to a limit, take the one that leaves most room.

    Args:
        config: The run's config.
        program: The run's program, as assembled from `config`.
        mesh: The devices.
        before: "remat" and "unroll" of the run that is resumed, if any. Variants round differently, so those that need
            more memory are not tried.
        held: Bytes that other weights, such as a teacher's, will take on each device during the steps.

    Returns:
        The program, its compiled step and the memory options that it was compiled with.

    Raises:
        UserError: No variant fits.
    """
    log.info("compiling the step")
    allowed = variants(config, program, current_device().platform, mesh.size)
    allowed = continuing(allowed, before)
    tried = []
    for changed in allowed:
        assembled = program if changed == config else assemble(program.model.base, changed, mesh)
        step = compile_step(assembled, changed)
        size, limit = _worst(need_of(assembled, len(mesh.local_devices), memory_of(step), held))
        # All processes must choose the same policy, so compare the largest share of any process.
        # The share of the limit, because hosts and devices may differ in size.
        share = multihost_utils.process_allgather(np.float32(size / max(1, limit.size))).max().item()
        tried.append((share, changed, assembled, step))
        if share <= CLOSE:
            break
        if changed is not allowed[-1]:
            log.info(
                "memory.remat=%r%s would need %s of %s (%s)",
                changed.memory.remat,
                " with memory.unroll" if changed.memory.unroll else "",
                format_bytes(size),
                format_bytes(limit.size),
                limit.name,
            )
    share, chosen, assembled, step = tried[-1] if share <= CLOSE else min(tried, key=lambda one: one[0])
    if config.memory.remat == "auto":
        log.info("memory.remat='auto' takes %r", chosen.memory.remat)
    if chosen.memory.unroll and not config.memory.unroll:
        log.info("layers are compiled one by one, for a faster step; memory.unroll=False compiles sooner")
    check_step(chosen, assembled, step, mesh, held)
    return assembled, step, chosen.memory


def check_step(
    config: Config, program: Program, step: jax.stages.Compiled, mesh: jax.sharding.Mesh, held: int = 0
) -> None:
    """Log the memory of the compiled step, and of `held` bytes. Raises UserError if it does not fit.

    The step is then compiled with other options too, to name those that would help.
    """

    def need(other: Config) -> Need:
        smaller = assemble(program.model.base, other, mesh)
        compiled = compile_step(smaller, other)
        return need_of(smaller, len(mesh.local_devices), memory_of(compiled), held)

    measured = need_of(program, len(mesh.local_devices), memory_of(step), held)
    log.info(
        "memory per device: %s state and batch, %s temporaries",
        format_bytes(measured.state),
        format_bytes(measured.temporaries),
    )
    parts = parts_of(program) | {"teacher": held}
    log.info("  state and batch: %s", ", ".join(f"{format_bytes(size)} {part}" for part, size in parts.items() if size))
    if measured.offloaded:
        log.info("host memory for offloading: %s", format_bytes(measured.offloaded))
    _judge(config, measured, need)


_EXHAUSTED = (
    *("RESOURCE_EXHAUSTED", "Cannot allocate memory", "can't start new thread"),  # XLA, an errno, a thread's stack
    "failed to map segment",  # a library that is imported late
)


@contextlib.contextmanager
def explain_out_of_memory(config: Config) -> Iterator[None]:
    """Turn any out-of-memory error of XLA, Python or the system into one UserError that names options to change."""
    try:
        yield
    except (RuntimeError, MemoryError, OSError, ImportError) as error:
        if not isinstance(error, MemoryError) and not any(sign in str(error) for sign in _EXHAUSTED):
            raise
        request = re.search(r"allocat\w+ [\d.]+ ?\w+", str(error))  # XLA: "allocate 8589934592 bytes"
        options = ", ".join(option for option, _ in _smaller(config))
        warnings.filterwarnings("ignore", "coroutine .* was never awaited")  # from a checkpoint that could not start
        raise UserError(
            f"out of memory{f' ({request[0]})' if request else ''}; is another process on this device or host? Options "
            f"that need less: {options}. Checkpoints are intact: --config=RUN/config.json resumes from the last one"
        ) from error


def _judge(config: Config, measured: Need, need: Callable[[Config], Need]) -> None:
    """Warn if `measured` is close to its limit. Raises UserError if it is above.

    `need` returns the need with another config, to name options that would help.
    """
    if config.memory.check == "off":
        return
    size, limit = _worst(measured)
    refused = size > limit.size and config.memory.check == "error"
    # If any process is refused, all must stop, or the others would wait for it forever.
    if multihost_utils.process_allgather(np.bool_(refused)).any() and not refused:
        raise UserError("this run needs more memory than another host has; see the message of that host's process")
    text = (
        f"this run needs {format_bytes(size)} of {format_bytes(limit.size)} ({limit.name}): for a device "
        f"{format_bytes(measured.state)} of parameters, optimizer state and batch and "
        f"{format_bytes(measured.temporaries)} of temporaries, and for the host a checkpoint's copy of "
        f"{format_bytes(measured.saved)}"
        f"{f', offloaded arrays of {format_bytes(measured.offloaded)}' if measured.offloaded else ''}"
        f"{f' and {format_bytes(measured.process)} for the process itself' if measured.process else ''}"
    )
    if refused:
        lines = [f"  {line}" for line in _list_remedies(config, measured, limit, need)]
        heading = " Options that would help, and the need with each:" if lines else ""
        raise UserError("\n".join([f"{text}.{heading}", *lines, "memory.check='warn' tries it anyway"]))
    if size > CLOSE * limit.size:
        log.warning("%s; it may not fit", text)


def _list_remedies(config: Config, measured: Need, limit: Limit, need: Callable[[Config], Need]) -> list[str]:
    """Return options that lower the need, with the need of each, smallest first."""
    size, _ = _worst(measured)
    remedies = []
    for option, other in _smaller(config):
        with contextlib.suppress(UserError):  # the option does not fit the model or the mesh
            # Leave out options that save less than 1%.
            then, _ = _worst(need(other))
            remedies += [(then, f"{option}: {format_bytes(then)}")] if then < 0.99 * size else []
    if limit.name == jax.devices()[0].device_kind and limit.size > measured.temporaries:
        # FSDP shards only the state, so take the power of two at which state and temporaries fit.
        share = 2 ** math.ceil(math.log2(max(2.0, measured.state / (limit.size - measured.temporaries))))
        then = measured.state // share + measured.temporaries
        remedies.append((then, f"mesh.fsdp={share} on {share} times as many devices: about {format_bytes(then)} each"))
    return [line for _, line in sorted(remedies)]


def _smaller(config: Config) -> Iterator[tuple[str, Config]]:
    """Yield single changes that lower the need, as (text, config); only changes valid with the other options."""
    train, data, lora = config.train, config.data, {"lora": {"enabled": True}}
    nf4 = {} if config.quant.format else {"quant": {"format": "nf4"}}
    gpu = current_device().platform == "gpu"
    rows, sums = train.micro_batch_size // 2, train.grad_accum_steps * 2
    changes: dict[str, dict[str, dict[str, Any]]] = {
        "memory.remat='block'": {"memory": {"remat": "block"}},
        "memory.remat='offload'": {"memory": {"remat": "offload"}} if gpu else {},
        "memory.offload_optimizer=True": {"memory": {"offload_optimizer": True}} if gpu else {},
        "memory.offload_quants=True": {"memory": {"offload_quants": True}} if gpu and config.quant.format else {},
        "memory.offload_optimizer=True, memory.offload_master=True and memory.offload_gradients=True": {
            "memory": {"offload_optimizer": True, "offload_master": True, "offload_gradients": True}
        }
        if gpu
        else {},
        "memory.unroll=False": {"memory": {"unroll": False}} if config.memory.unroll else {},
        "lora.enabled=True, adapters instead of all weights": {} if config.lora.enabled else lora,
        "quant.format='nf4', the base in 4 bits, under adapters": nf4 if config.lora.enabled else {**lora, **nf4},
        "optim.name='adamw_8bit'": {"optim": {"name": "adamw_8bit"}} if config.optim.name == "adamw" else {},
        f"train.micro_batch_size={rows} and train.grad_accum_steps={sums}, the same steps": {
            "train": {"micro_batch_size": rows, "grad_accum_steps": sums}
        },
        f"data.seq_len={data.seq_len // 2}": {"data": {"seq_len": data.seq_len // 2}},
    }
    for text, sections in changes.items():
        replaced = {name: dataclasses.replace(getattr(config, name), **values) for name, values in sections.items()}
        other = dataclasses.replace(config, **replaced)
        if other != config and not checks.check(other):
            yield text, other


def need_of(program: Program, devices: int, step: CompiledMemory | None = None, held: int = 0) -> Need:
    """Return the need of a process with `devices` devices, each of which also holds `held` other bytes.

    Before the step is compiled, the need is without its temporaries.
    """
    saved = sum(map(shard_bytes, jax.tree.leaves(program.state))) * devices
    if step is None:
        everything, on_device = (
            sum(map(measure, jax.tree.leaves(program.arguments))) for measure in (shard_bytes, device_bytes)
        )
        return Need(devices, on_device + held, 0, saved, (everything - on_device) * devices, PROCESS)
    new_outputs = step.outputs - step.aliased  # outputs that do not reuse a donated argument's memory
    # The last field is 0: the memory of a process that has compiled is no longer in `host_memory`.
    return Need(devices, step.arguments + held, step.temporaries + max(0, new_outputs), saved, step.host * devices, 0)


def parts_of(program: Program) -> dict[str, int]:
    """Return the bytes that each kind of the step's arguments takes on a device."""
    trained, frozen = program.state.trained, {**program.frozen, **program.state.base}
    adapters = {name for name, parameter in program.model.parameters.items() if parameter.kind == "adapter"}
    quantized = program.model.quantized
    by_part = {
        "trained weights": [leaf for name, leaf in trained.items() if name not in adapters],
        "adapters": [leaf for name, leaf in trained.items() if name in adapters],
        "frozen weights": [leaf for name, leaf in frozen.items() if name not in quantized],
        "quantized weights": [leaf for name, leaf in frozen.items() if name in quantized],
        "optimizer state": program.state.optimizer,
        "reference": program.state.reference,
        "average": program.state.average,
        "batch": program.batch,
    }
    return {part: sum(map(device_bytes, jax.tree.leaves(leaves))) for part, leaves in by_part.items()}


def shard_bytes(leaf: jax.ShapeDtypeStruct) -> int:
    """Return the bytes of an array's shard on one device."""
    shape = leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)
    return math.prod(shape) * leaf.dtype.itemsize


def device_bytes(leaf: jax.ShapeDtypeStruct) -> int:
    """Return the bytes of an array's shard on one device, 0 for an array in the host's memory."""
    return 0 if is_on_host(leaf) else shard_bytes(leaf)


def _worst(need: Need) -> tuple[int, Limit]:
    """Return the need that is closest to its limit, device or host, and that limit. Simulated devices use the host."""
    stats = jax.local_devices()[0].memory_stats() or {}
    host = host_memory()
    if "bytes_limit" not in stats:  # CPU: simulated devices are in host memory
        return need.device * need.devices + need.host, host
    device = Limit(stats["bytes_limit"] - stats.get("bytes_in_use", 0), jax.devices()[0].device_kind)
    return max((need.device, device), (need.host, host), key=lambda pair: pair[0] / max(1, pair[1].size))


def host_memory() -> Limit:
    """Return the host memory this process may still take: the smallest of free memory, cgroup limits and ulimit."""
    limits = []
    if (meminfo := Path("/proc/meminfo")).exists():
        # The kernel's estimate, which counts caches that it can drop; the unit "kB" is 1024 bytes.
        available = re.search(r"MemAvailable: +(\d+) kB", meminfo.read_text())
        limits += [Limit(int(available[1]) * 1024, "free on this host")] if available else []
    limits += list(_cgroup_limits(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")))
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)  # `ulimit -v`
    if soft != resource.RLIM_INFINITY:
        used = re.search(r"VmSize:\s+(\d+) kB", Path("/proc/self/status").read_text())
        left = max(0, soft - int(used[1]) * 1024) if used else soft
        limits.append(Limit(left, "limit of this process's address space"))
    return min(limits, default=Limit(2**63, "unknown"))


def _cgroup_limits(root: Path, membership: Path) -> Iterator[Limit]:
    """Yield the memory left in each cgroup of this process, of version 2 or 1.

    `root`: the mounted cgroup file system; `membership`: the file that lists the process's cgroups.
    """
    lines = membership.read_text().splitlines() if membership.exists() else []
    # A line is NUMBER:CONTROLLERS:PATH; version 2 has one line, "0::PATH".
    for _, controllers, path in (line.split(":", 2) for line in lines):
        version_2 = not controllers
        if not version_2 and "memory" not in controllers.split(","):
            continue
        # The two versions name their files differently, and version 1 has a folder for each controller.
        names = ("memory.max", "memory.current") if version_2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        top = root if version_2 else root / "memory"
        group = top / path.lstrip("/")
        # Memory of a group also counts against the limits of all groups above it.
        for folder in (group, *group.parents):
            size, used = (folder / names[0], folder / names[1])
            # Version 2 writes "max" for no limit.
            if size.exists() and used.exists() and (text := size.read_text().strip()).isdecimal():
                stat = folder / "memory.stat"
                cached = re.search(r"^(?:file|cache) (\d+)", stat.read_text() if stat.exists() else "", re.MULTILINE)
                # The page cache counts as used, but the kernel frees it when memory is needed.
                left = int(text) - int(used.read_text()) + (int(cached[1]) if cached else 0)
                yield Limit(max(0, left), f"memory limit of the cgroup {folder}")
            if folder == top:
                break
