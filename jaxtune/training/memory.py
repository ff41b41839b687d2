"""Whether a run fits: what it needs, from shapes and the compiled step, against what device and host have.

A run whose state alone does not fit is refused before its data is read or a weight is allocated; any other that does
not fit, once its step is compiled. The message says what would help, and what the run would then need.
"""

import contextlib
import dataclasses
import logging
import math
import re
import resource
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxtune.config import checks
from jaxtune.config.schema import Config
from jaxtune.errors import UserError
from jaxtune.models.forward_options import Remat
from jaxtune.parallel.offload import is_on_host
from jaxtune.training.assembly import Program, assemble, compile_step
from pallas_kernels.aot import Memory, memory_of
from pallas_kernels.gpus import current_device

log = logging.getLogger("jaxtune")
CLOSE = 0.9  # of the limit; a need above that is warned of
# Each recomputes more than the one before, or moves more, and needs less of the device.
POLICIES: tuple[Remat, ...] = ("none", "dots", "block", "offload")
# Host memory that a process which has compiled nothing yet will take beside the model: compiler, threads, libraries.
# Measured with jax 0.10 on a tiny model: where 248 MB were left it ran, where 198 MB were left the kernel killed it.
PROCESS = 240_000_000


@dataclass(frozen=True)
class Need:
    """What a process needs of each of its devices, and of the host, in bytes."""

    devices: int
    state: int  # of a device: parameters, optimizer state, a batch
    temporaries: int  # of a device
    saved: int  # of the host: a checkpoint's copy of the trained state of all devices of the process
    offloaded: int  # of the host: what memory.offload_* and memory.remat='offload' put there, of all its devices
    process: int  # of the host: the process itself

    @property
    def host(self) -> int:
        """Of the host, without what simulated devices take of it."""
        return self.saved + self.offloaded + self.process

    @property
    def device(self) -> int:
        """Of a device, all in all."""
        return self.state + self.temporaries


@dataclass(frozen=True, order=True)
class Limit:
    """The bytes that there are, and what says so."""

    size: int
    name: str


def check_state(config: Config, program: Program, mesh: jax.sharding.Mesh) -> None:
    """Raises UserError where parameters, optimizer state and a batch are already more than there is."""

    def need(other: Config) -> Need:
        return need_of(assemble(program.model.base, other, mesh), len(mesh.local_devices))

    _judge(config, need_of(program, len(mesh.local_devices)), need)


def policies(config: Config, platform: str) -> tuple[Remat, ...]:
    """The rematerialisation policies that a run may take, of which it takes the first whose step fits."""
    if config.memory.remat != "auto":
        return (config.memory.remat,)
    # XLA's code for CPUs is faster with 'block' than without: it writes and reads less.
    return POLICIES if platform == "gpu" else ("block",)


def with_policy(config: Config, remat: Remat) -> Config:
    """The config with this rematerialisation policy."""
    return dataclasses.replace(config, memory=dataclasses.replace(config.memory, remat=remat))


def compile_what_fits(
    config: Config, program: Program, mesh: jax.sharding.Mesh, before: Remat | None
) -> tuple[Program, jax.stages.Compiled, Remat]:
    """The program and its step with the rematerialisation policy that the config says, or the first that fits.

    Where all are close to a limit, it is the one that leaves most room.
    before: the policy of the run that goes on. Another one would round otherwise, so that none faster is tried.
    Raises UserError where none fits.
    """
    allowed = policies(config, current_device().platform)
    allowed = allowed[allowed.index(before) :] if before in allowed else allowed
    tried = []
    for remat in allowed:
        own = with_policy(config, remat)
        assembled = program if own == config else assemble(program.model.base, own, mesh)
        step = compile_step(assembled, own)
        size, limit = _worst(need_of(assembled, len(mesh.local_devices), memory_of(step)))
        share = multihost_utils.process_allgather(np.float32(size / max(1, limit.size))).max().item()
        tried.append((share, own, assembled, step))
        if share <= CLOSE:
            break
        if remat != allowed[-1]:
            log.info("memory.remat=%r would need %s of %s (%s)", remat, _gb(size), _gb(limit.size), limit.name)
    share, own, assembled, step = tried[-1] if share <= CLOSE else min(tried, key=lambda one: one[0])
    if config.memory.remat == "auto":
        log.info("memory.remat='auto' takes %r", own.memory.remat)
    check_step(own, assembled, step, mesh)
    return assembled, step, own.memory.remat


def check_step(config: Config, program: Program, step: jax.stages.Compiled, mesh: jax.sharding.Mesh) -> None:
    """Logs what the compiled step takes. Raises UserError where that is more than there is.

    Other options are compiled then, to say what would help.
    """

    def need(other: Config) -> Need:
        smaller = assemble(program.model.base, other, mesh)
        compiled = compile_step(smaller, other)
        return need_of(smaller, len(mesh.local_devices), memory_of(compiled))

    own = need_of(program, len(mesh.local_devices), memory_of(step))
    log.info("memory a device: %s state and batch, %s temporaries", _gb(own.state), _gb(own.temporaries))
    log.info("  of it %s", ", ".join(f"{_gb(size)} {part}" for part, size in parts_of(program).items() if size))
    if own.offloaded:
        log.info("offloaded to the host, of all its devices: %s", _gb(own.offloaded))
    _judge(config, own, need)


_EXHAUSTED = (
    *("RESOURCE_EXHAUSTED", "Cannot allocate memory", "can't start new thread"),  # XLA, an errno, a thread's stack
    "failed to map segment",  # of a library that is imported late
)


@contextlib.contextmanager
def out_of_memory_is_answered(config: Config) -> Iterator[None]:
    """Makes one message of any error by which XLA, Python or the system says that memory ran out."""
    try:
        yield
    except (RuntimeError, MemoryError, OSError, ImportError) as error:
        if not isinstance(error, MemoryError) and not any(sign in str(error) for sign in _EXHAUSTED):
            raise
        asked = re.search(r"allocat\w+ [\d.]+ ?\w+", str(error))
        options = ", ".join(option for option, _ in _smaller(config))
        warnings.filterwarnings("ignore", "coroutine .* was never awaited")  # of a checkpoint that could not be begun
        raise UserError(
            f"out of memory{f' ({asked[0]})' if asked else ''}; is something else on this device or host? What needs "
            f"less: {options}. Checkpoints are whole: --config=RUN/config.json goes on from the last one"
        ) from error


def _judge(config: Config, own: Need, need: Callable[[Config], Need]) -> None:
    """Warns where `own` is close to its limit, raises UserError where it is above. `need`: that of other options."""
    if config.memory.check == "off":
        return
    size, limit = _worst(own)
    refused = size > limit.size and config.memory.check == "error"
    if multihost_utils.process_allgather(np.bool_(refused)).any() and not refused:
        raise UserError("this run needs more memory than another host has; that process says more")
    text = (
        f"this run needs {_gb(size)} of {_gb(limit.size)} ({limit.name}): for a device {_gb(own.state)} of parameters, "
        f"optimizer state and batch and {_gb(own.temporaries)} of temporaries, and for the host a checkpoint's copy of "
        f"{_gb(own.saved)}{f', offloaded arrays of {_gb(own.offloaded)}' if own.offloaded else ''}"
        f"{f' and {_gb(own.process)} for the process itself' if own.process else ''}"
    )
    if refused:
        lines = [f"  {line}" for line in _what_helps(config, own, limit, need)]
        what_helps = " What would help, and the need then:" if lines else ""
        raise UserError("\n".join([f"{text}.{what_helps}", *lines, "memory.check='warn' tries it all the same"]))
    if size > CLOSE * limit.size:
        log.warning("%s; it may not fit", text)


def _what_helps(config: Config, own: Need, limit: Limit, need: Callable[[Config], Need]) -> list[str]:
    """Options and the need with each, the smallest first."""
    size, _ = _worst(own)
    found = []
    for option, other in _smaller(config):
        with contextlib.suppress(UserError):  # the option does not fit the model or the mesh
            then, _ = _worst(need(other))
            found += [(then, f"{option}: {_gb(then)}")] if then < 0.99 * size else []
    if limit.name == jax.devices()[0].device_kind and limit.size > own.temporaries:
        share = 2 ** math.ceil(math.log2(max(2.0, own.state / (limit.size - own.temporaries))))
        then = own.state // share + own.temporaries
        found.append((then, f"mesh.fsdp={share} on {share} times as many devices: about {_gb(then)} each"))
    return [line for _, line in sorted(found)]


def _smaller(config: Config) -> Iterator[tuple[str, Config]]:
    """Changes that need less, each alone; only those that are valid with the other options."""
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
        "memory.unroll=False": {"memory": {"unroll": False}},
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


def need_of(program: Program, devices: int, step: Memory | None = None) -> Need:
    """The need of a process with so many devices; before the step is compiled, without its temporaries."""
    saved = sum(map(shard_bytes, jax.tree.leaves(program.state))) * devices
    if step is None:
        whole, here = (sum(map(of, jax.tree.leaves(program.arguments))) for of in (shard_bytes, device_bytes))
        return Need(devices, here, 0, saved, (whole - here) * devices, PROCESS)
    made = step.outputs - step.aliased
    return Need(devices, step.arguments, step.temporaries + max(0, made), saved, step.host * devices, 0)


def parts_of(program: Program) -> dict[str, int]:
    """What the arguments of the step take of a device, by what they are, in bytes."""
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
    """Of an array, the bytes on one device."""
    shape = leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)
    return math.prod(shape) * leaf.dtype.itemsize


def device_bytes(leaf: jax.ShapeDtypeStruct) -> int:
    """`shard_bytes` of what is not in the host's memory."""
    return 0 if is_on_host(leaf) else shard_bytes(leaf)


def _worst(need: Need) -> tuple[int, Limit]:
    """Of the needs of this process the one nearest to its limit, and that limit. Simulated devices are on the host."""
    stats = jax.local_devices()[0].memory_stats() or {}
    host = host_memory()
    if "bytes_limit" not in stats:
        return need.device * need.devices + need.host, host
    device = Limit(stats["bytes_limit"] - stats.get("bytes_in_use", 0), jax.devices()[0].device_kind)
    return max((need.device, device), (need.host, host), key=lambda pair: pair[0] / max(1, pair[1].size))


def host_memory() -> Limit:
    """Memory of the host that this process may still take: the least of what is free and what limits leave it."""
    found = []
    if (meminfo := Path("/proc/meminfo")).exists():
        available = re.search(r"MemAvailable: +(\d+) kB", meminfo.read_text())
        found += [Limit(int(available[1]) * 1024, "free on this host")] if available else []
    found += list(_cgroup_limits(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")))
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        used = re.search(r"VmSize:\s+(\d+) kB", Path("/proc/self/status").read_text())
        left = max(0, soft - int(used[1]) * 1024) if used else soft
        found.append(Limit(left, "limit of this process's address space"))
    return min(found, default=Limit(2**63, "unknown"))


def _cgroup_limits(root: Path, own: Path) -> Iterator[Limit]:
    """What each cgroup of this process has left; version 2, and 1."""
    lines = own.read_text().splitlines() if own.exists() else []
    for _, controllers, path in (line.split(":", 2) for line in lines):
        version_2 = not controllers
        if not version_2 and "memory" not in controllers.split(","):
            continue
        names = ("memory.max", "memory.current") if version_2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        top = root if version_2 else root / "memory"
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):
            size, used = (folder / names[0], folder / names[1])
            if size.exists() and used.exists() and (text := size.read_text().strip()).isdecimal():
                stat = folder / "memory.stat"
                cached = re.search(r"^(?:file|cache) (\d+)", stat.read_text() if stat.exists() else "", re.MULTILINE)
                left = int(text) - int(used.read_text()) + (int(cached[1]) if cached else 0)  # freed when needed
                yield Limit(max(0, left), f"memory limit of the cgroup {folder}")
            if folder == top:
                break


def _gb(size: float) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
