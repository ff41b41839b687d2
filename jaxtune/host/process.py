"""Settings of the process: its place among others, its log, its compilation cache, and XLA's options for a GPU."""

import hashlib
import itertools
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from orbax.checkpoint.multihost import get_barrier_sync_fn

import pallas_kernels
from jaxtune.config.loading import as_dict
from jaxtune.config.schema import Config, Device, Log
from jaxtune.errors import UserError
from jaxtune.host import plugins
from jaxtune.monitor.progress import FILE
from jaxtune.parallel import multihost
from jaxtune.parallel.multihost import visible_gpus
from jaxtune.terminal import REFUSED, LogFormatter, without_secrets
from pallas_kernels.gpus import current_device

log = logging.getLogger("jaxtune")
Options = dict[str, str | bool | int]

GPU_OPTIONS: Options = {
    # Matrix products go to cuBLASLt. XLA chooses its Triton fusions for them well only by timing on the GPU, which
    # costs start-up time; without timing it would take them for every product.
    "xla_gpu_enable_triton_gemm": False,
    # Products of the same input stay apart. To make one of them XLA would put their weights together, in each layer of
    # each pass, and cut the results apart again.
    "xla_gpu_dot_merger_threshold_mb": 0,
    # The stacks in which a scan leaves its results are not filled with zeros first, as it writes all of them.
    "xla_gpu_enable_dus_accumulator_zero_init_elimination": True,
    # What the code rounds to bfloat16 is rounded. Otherwise XLA may keep it in float32, and read and write twice the
    # bytes, as it does with what is quantized to FP8.
    "xla_allow_excess_precision": False,
    # The gradient of a weight is reduce-scattered as soon as it is there: those of a layer together would wait for the
    # last one, with no product left to hide them. In bytes of a device's part: the small ones of adapters go together.
    "xla_gpu_reduce_scatter_combine_threshold_bytes": 2**18,
    # Products run while weights are gathered and gradients scattered, and while layers are copied from the host. By
    # itself XLA has the former so on Hopper alone, and the latter nowhere; it would wait for each.
    "xla_gpu_enable_latency_hiding_scheduler": True,
    # What is recomputed is for memory.remat to say. Near the end of the GPU's memory XLA would compute products of the
    # backward pass three times over, and save next to nothing by it.
    "xla_disable_hlo_passes": "rematerialization",
    # XLA of jax 0.11 puts a matrix product and the copy of its result into a scan's stack into one fusion, and computes
    # the product a second time if the layer uses it too: six of the seven of a layer's forward pass.
    **({"xla_gpu_enable_dynamic_slice_fusion": False} if jax.__version_info__[:2] == (0, 11) else {}),
}
DETERMINISTIC_OPTIONS: Options = {
    # Scatters and reductions without atomics, whose order differs from run to run. XLA also tells cuDNN to take its
    # deterministic backward pass of attention, so attention.backend='cudnn' needs no rule as fa3 does.
    "xla_gpu_deterministic_ops": True,
    # No algorithm chosen by timing, which may choose another one the next time.
    "xla_gpu_autotune_level": 0,
}
# By device.command_buffers: what XLA puts into CUDA graphs. Its own choice leaves out loops. With loops a step on an
# H200 was no faster, or failed in XLA of jax 0.11.2 (benchmarks/results/nvidia_h200.json, step_choices).
COMMAND_BUFFERS: dict[str, Options] = {"auto": {}, "off": {"xla_gpu_enable_command_buffer": ""}}


def compiler_options(config: Config = Config()) -> Options:
    """`compiler_options` of jax.jit for the device of the mesh in use; what XLA_FLAGS names is left as it says.

    Raises UserError where an option of `device` cannot take effect.
    """
    flags, wanted = os.environ.get("XLA_FLAGS", ""), COMMAND_BUFFERS[config.device.command_buffers]
    on_gpu = current_device().platform == "gpu"
    if wanted and (not on_gpu or any(name in flags for name in wanted)):
        reason = "XLA_FLAGS says it too; leave one of them out" if on_gpu else "there are CUDA graphs on GPUs alone"
        raise UserError(f"device.command_buffers = {config.device.command_buffers!r}: {reason}")
    if not on_gpu:
        return {}
    options = GPU_OPTIONS | (DETERMINISTIC_OPTIONS if config.train.deterministic else {}) | wanted
    return {name: value for name, value in options.items() if name not in flags}


# XLA's limits of how long GPUs wait for each other to begin: the threads of a process for one another, while one of
# them meets other processes. XLA reads them from XLA_FLAGS alone, and takes them as compiler options without effect.
COLLECTIVE_TIMEOUTS = (
    "xla_gpu_nccl_termination_timeout_seconds",
    "xla_gpu_first_collective_call_terminate_timeout_seconds",
    "xla_gpu_executable_terminate_timeout",
)

LEAVE_SECONDS = 10
# Fraction of a GPU's memory that XLA takes at the start: by default 0.75, which leaves a quarter of it unused.
MEMORY_FRACTION = "0.93"


def configure(config: Config) -> None:
    """Before the first device is touched: join the other processes, keep compiled programs, show the log.

    The first lines of the log are what the config left out because it could have no effect. Raises UserError where
    other processes have other options, other code or another jax: they would compute something else, or hang; and where
    an option of `device` cannot take effect.
    """
    if "XLA_PYTHON_CLIENT_MEM_FRACTION" not in os.environ:  # the same by its older name
        os.environ.setdefault("XLA_CLIENT_MEM_FRACTION", MEMORY_FRACTION)
    # By default XLA gives at most 64 GiB of the host's memory to what memory.offload_* and memory.remat keep there.
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    os.environ.setdefault("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", str(memory // 2**30))
    choose_platform(config.device)
    multihost.initialize()
    open_devices(config.device)
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        jax.config.update("jax_compilation_cache_dir", str(Path(config.train.output_dir).absolute() / "cache" / "xla"))
    _show_log(config.log)
    if jax.process_count() > 1:
        multihost.agree(facts(config))
    for line in config.opening_lines:
        log.info(line)


def choose_platform(device: Device) -> None:
    """Tells jax and XLA what they read once, when they first look for devices."""
    if device.platform != "auto":
        # The CPU after it: where there is nothing else, and no plugin for GPUs, jax 0.10 fails in an assertion.
        said = jax.config.values["jax_platforms"] or {"cuda": "cuda,cpu"}.get(device.platform, device.platform)
        if said.split(",")[0].replace("gpu", "cuda") != device.platform:
            raise UserError(f"device.platform = {device.platform!r}: JAX_PLATFORMS is {said!r}; leave one of them out")
        jax.config.update("jax_platforms", said)
    if device.collective_timeout_seconds is not None:
        flags = os.environ.get("XLA_FLAGS", "").split()
        own = [f"--{name}={device.collective_timeout_seconds}" for name in COLLECTIVE_TIMEOUTS]
        others = " ".join(flag for flag in flags if flag not in own)  # they are there where this is a second run
        if named := [name for name in COLLECTIVE_TIMEOUTS if name in others]:
            raise UserError(
                f"device.collective_timeout_seconds = {device.collective_timeout_seconds}: XLA_FLAGS says "
                f"{' and '.join(named)} too; leave one of them out"
            )
        os.environ["XLA_FLAGS"] = " ".join([others, *own]).strip()


def open_devices(device: Device) -> None:
    """Opens the devices of this process, and of its GPUs no other: jax would take their memory too."""
    if device.gpus is not None:
        visible = jax.config.values["jax_cuda_visible_devices"]
        ids = [str(i) for i in range(visible_gpus(os.environ))] if visible == "all" else visible.split(",")
        if device.gpus <= len(ids):
            jax.config.update("jax_cuda_visible_devices", ",".join(ids[: device.gpus]))
    try:
        found = jax.default_backend().replace("gpu", "cuda")
    except RuntimeError as error:  # jax's own text says which platform there is none of, and what to do
        raise UserError(f"device.platform = {device.platform!r}: {error}") from error
    if device.platform not in ("auto", found):
        raise UserError(
            f"device.platform = {device.platform!r}: jax computes on {found!r} here: it has no plugin for the other "
            "(pip install 'jaxtune[cuda12]'), or began to compute before this option was read"
        )
    if device.collective_timeout_seconds is not None and found != "cuda":
        raise UserError(
            f"device.collective_timeout_seconds = {device.collective_timeout_seconds}: XLA has such limits for GPUs "
            "alone; train.hang_seconds is for every device"
        )


def devices(device: Device) -> list[Any]:
    """The devices that a run's mesh spans. Raises UserError where a process has fewer than `device.gpus`."""
    by_process: dict[int, list[Any]] = {}
    for one in jax.devices():
        by_process.setdefault(one.process_index, []).append(one)
    for process, own in by_process.items():
        if device.gpus is not None and len(own) < device.gpus:
            found = f"process {process} has {len(own)} devices ({own[0].platform})"
            raise UserError(f"device.gpus = {device.gpus}: {found}")
    return [one for own in by_process.values() for one in own[: device.gpus]]


def facts(config: Config) -> dict[str, str]:
    """What must be the same in all processes of a run, by name."""
    options = jax.tree_util.tree_leaves_with_path(as_dict(config), is_leaf=lambda leaf: leaf is None)
    code = (Path(__file__).parents[1], Path(str(pallas_kernels.__file__)).parent)
    return {
        **{name: version(name) for name in ("jax", "jaxlib")},
        "code of jaxtune": digest(code),
        **{f"content of {name}": content for name, content in plugins.contents(config).items()},
        **{jax.tree_util.keystr(path, simple=True, separator="."): repr(value) for path, value in options},
    }


def digest(folders: Iterable[Path]) -> str:
    """A short hash of the Python sources in folders: names and content."""
    found = hashlib.sha256()
    for folder in folders:
        for file in sorted(folder.rglob("*.py")):
            found.update(f"{file.relative_to(folder)}\0".encode() + file.read_bytes() + b"\0")
    return found.hexdigest()[:12]


WAIT_SECONDS = 7 * 24 * 3600  # for the main process: its copies and uploads may take long, and end by themselves
_BARRIERS = itertools.count()  # each needs a name of its own, which is the same in all processes


def on_main(work: Callable[[], None]) -> None:
    """The main process does this while the others wait on the host, and not in a collective, which has time limits.

    Raises UserError in all of them where it is raised in the main one.
    """
    failure = None
    if multihost.is_main():
        try:
            work()
        except UserError as error:
            failure = error
    get_barrier_sync_fn()(key=f"jaxtune on_main {next(_BARRIERS)}", timeout_ms=WAIT_SECONDS * 1000)
    if multihost_utils.broadcast_one_to_all(np.bool_(failure is not None)):
        raise failure or UserError("process 0 failed, and says why")


_OF_COLLECTIVES = ("Gloo", "NCCL", "UNAVAILABLE")  # in errors of XLA: its libraries, or its service does not answer


@contextmanager
def leaving_after_failure() -> Iterator[None]:
    """Where several processes run and this one fails, it ends, LEAVE_SECONDS later at the latest.

    At exit jax would wait for the others, for minutes, while they may wait for this one in a collective. If all fail
    alike, they end at once. If a collective failed, mostly because another process has ended, one line says so; the
    exit code is 1, so that launchers start all processes again.
    """
    try:
        yield
    except BaseException as error:
        if jax.process_count() > 1:
            code = REFUSED if isinstance(error, UserError) else 1
            leave = threading.Timer(LEAVE_SECONDS, os._exit, (code,))
            leave.daemon = True
            leave.start()
            if isinstance(error, jax.errors.JaxRuntimeError) and any(sign in str(error) for sign in _OF_COLLECTIVES):
                said = f"process {jax.process_index()}: a collective with the other processes failed: {error}"
                more = "If one of them has ended, its log says why. A restart continues from the last checkpoint"
                print(f"jaxtune: error: {' '.join(said.split())}. {more}", file=sys.stderr, flush=True)
                raise SystemExit(1) from error
        raise


class _Terminal(logging.StreamHandler):
    """Log lines on the terminal, whose errors end the command: as a pipe that nobody reads does."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Raises what `emit` has caught."""
        raise


_SHOWN = ("jaxtune", "pallas_kernels")


def _show_log(options: Log) -> None:
    """What jaxtune and its kernels log on the terminal, of the main process; of others warnings, or all of it."""
    level, shown = logging.getLevelNamesMapping()[options.level.upper()], _Terminal(sys.stdout)
    shown.setFormatter(LogFormatter())
    if not multihost.is_main():
        level = level if options.every_process else max(level, logging.WARNING)
        shown.setFormatter(LogFormatter(f"process {jax.process_index()}: %(message)s"))
    for name in _SHOWN:
        logger = logging.getLogger(name)
        logger.handlers = [shown]
        logger.propagate = False
        logger.setLevel(level)
        logger.addFilter(without_secrets)


@contextmanager
def log_to_file(config: Config, folder: Path) -> Iterator[None]:
    """What the main process shows is appended to log.file meanwhile, each line with its time, and a UserError."""
    if config.log.file is None or not multihost.is_main():
        yield
        return
    file = folder / Path(config.log.file).expanduser()  # which may be absolute
    file.parent.mkdir(parents=True, exist_ok=True)
    written = logging.FileHandler(file, encoding="utf-8", delay=True)
    written.setFormatter(LogFormatter("%(asctime)s  %(message)s", "%Y-%m-%d %H:%M:%S"))
    loggers = [*map(logging.getLogger, _SHOWN), FILE]
    FILE.propagate = False
    FILE.setLevel(logging.INFO)
    FILE.addFilter(without_secrets)
    for logger in loggers:
        logger.addHandler(written)
    for line in config.opening_lines:  # which were shown before the folder was known
        FILE.info("%s", line)
    try:
        yield
    except UserError as error:
        FILE.error("error: %s", error)
        raise
    finally:
        for logger in loggers:
            logger.removeHandler(written)
        written.close()
