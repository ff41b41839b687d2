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

import pallas_kernels
from jaxtune.config.loading import as_dict
from jaxtune.config.schema import Config, DeviceOptions, LogOptions
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
    # Do not merge products of the same input. XLA would concatenate their weights in each layer of each pass, and split
    # the results again.
    "xla_gpu_dot_merger_threshold_mb": 0,
    # Do not fill the stacked results of a scan with zeros first: the scan writes every element.
    "xla_gpu_enable_dus_accumulator_zero_init_elimination": True,
    # Round to bfloat16 wherever the code does. Otherwise XLA may keep the value in float32, and read and write twice
    # the bytes, as it does with values that are quantized to FP8.
    "xla_allow_excess_precision": False,
    # Reduce-scatter the gradient of a weight as soon as it is computed: combined, the gradients of a layer would wait
    # for the last one, and no product would be left to hide them. The threshold is in bytes of a device's shard: small
    # gradients, of adapters, are still combined.
    "xla_gpu_reduce_scatter_combine_threshold_bytes": 2**18,
    # Overlap products with all-gathers of weights and reduce-scatters of gradients, and with copies of layers from the
    # host. By default XLA overlaps the former only on Hopper, and the latter on no GPU: it would wait for each.
    "xla_gpu_enable_latency_hiding_scheduler": True,
    # Only memory.remat decides about recomputation. Near the limit of the GPU's memory XLA's own pass would compute
    # products of the backward pass three times, and save next to nothing.
    "xla_disable_hlo_passes": "rematerialization",
    # XLA of jax 0.11 fuses a matrix product with the copy of its result into a scan's stack, and computes the product a
    # second time if the layer uses it too: six of the seven products of a layer's forward pass.
    **({"xla_gpu_enable_dynamic_slice_fusion": False} if jax.__version_info__[:2] == (0, 11) else {}),
}
SEVERAL_DEVICES_OPTIONS: Options = {
    # Overlap collectives with products also if XLA's own estimate of the step's memory is above 95% of the GPU's. The
    # estimate is high, and whether the compiled step fits is checked afterwards (training/memory.py).
    "xla_gpu_memory_limit_slop_factor": 110,
}
# So many collectives may have begun and not ended. With XLA's default of 1 the all-gather of a weight begins when the
# one before it has ended, and little work is left to hide it. They run one after another all the same, on one stream
# (https://github.com/openxla/xla/pull/17749). marin-community/marin trains on GPUs with 4.
OVERLAP_LIMIT = "xla_gpu_experimental_parallel_collective_overlap_limit"
FSDP_AXES = {"data", "fsdp"}
DETERMINISTIC_OPTIONS: Options = {
    # Scatters and reductions without atomics, whose order differs from run to run. With this flag XLA also selects
    # cuDNN's deterministic backward pass of attention, so attention.backend='cudnn' needs no special case, unlike fa3.
    "xla_gpu_deterministic_ops": True,
    # Do not choose algorithms by timing: the next run may choose others.
    "xla_gpu_autotune_level": 0,
}
# By device.command_buffers: which work XLA puts into CUDA graphs. XLA's default leaves out loops. With loops, a step on
# an H200 did not become faster, or failed in XLA of jax 0.11.2 (benchmarks/results/nvidia_h200.json, step_choices).
COMMAND_BUFFERS: dict[str, Options] = {"auto": {}, "off": {"xla_gpu_enable_command_buffer": ""}}


def compiler_options(config: Config = Config()) -> Options:
    """The `compiler_options` of jax.jit for the device of the mesh in use, without those that XLA_FLAGS sets.

    Raises UserError if an option of `device` cannot take effect.
    """
    flags, wanted = os.environ.get("XLA_FLAGS", ""), COMMAND_BUFFERS[config.device.command_buffers]
    on_gpu = current_device().platform == "gpu"
    if wanted and (not on_gpu or any(name in flags for name in wanted)):
        reason = "XLA_FLAGS sets it too; remove one of the two" if on_gpu else "only GPUs have CUDA graphs"
        raise UserError(f"device.command_buffers = {config.device.command_buffers!r}: {reason}")
    if not on_gpu:
        return {}
    mesh = jax.sharding.get_mesh()
    sharded = {axis for axis, size in mesh.shape.items() if size > 1}
    options = dict(GPU_OPTIONS)
    if sharded:
        options |= SEVERAL_DEVICES_OPTIONS | {OVERLAP_LIMIT: _overlap_limit(mesh, sharded)}
    options |= (DETERMINISTIC_OPTIONS if config.train.deterministic else {}) | wanted
    return {name: value for name, value in options.items() if name not in flags}


def _overlap_limit(mesh: jax.sharding.Mesh, sharded: set[str]) -> int:
    """Return the overlap limit with which the shapes of benchmarks/predicted_speeds.py are predicted to be fastest.

    The higher it is, the longer activations, which are needed at once, wait behind weights that are gathered early. In
    one host gathers are quick: most steps are equal with 1 and 2, mixtures are faster with 2, and with "tensor" 1 is.
    """
    several_hosts = multihost.count_hosts(mesh) > 1
    if several_hosts and sharded <= FSDP_AXES:
        return 4
    return 2 if several_hosts or "tensor" not in sharded else 1


# XLA's limits of how long GPUs wait for each other to begin: the threads of one process, while one of them waits for
# other processes. XLA reads them only from XLA_FLAGS; as compiler options they are accepted and have no effect.
COLLECTIVE_TIMEOUTS = (
    "xla_gpu_nccl_termination_timeout_seconds",
    "xla_gpu_first_collective_call_terminate_timeout_seconds",
    "xla_gpu_executable_terminate_timeout",
)

LEAVE_SECONDS = 10
# Fraction of a GPU's memory that XLA allocates at the start. The default, 0.75, would leave a quarter unused.
MEMORY_FRACTION = "0.93"


def configure(config: Config) -> None:
    """Set up the process before jax touches a device: join other processes, open the compilation cache, show the log.

    The first lines of the log name the options that were dropped because they could have no effect. Raises UserError if
    other processes have other options, other code or another version of jax (they would compute something else, or
    hang), and if an option of `device` cannot take effect.
    """
    if "XLA_PYTHON_CLIENT_MEM_FRACTION" not in os.environ:  # the older name of the same variable
        os.environ.setdefault("XLA_CLIENT_MEM_FRACTION", MEMORY_FRACTION)
    # XLA's default limit is 64 GiB of host memory, for everything that memory.offload_* and memory.remat keep there.
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
        multihost.host_names()  # later calls need no other process
    for line in config.startup_notes:
        log.info(line)


def choose_platform(device: DeviceOptions) -> None:
    """Set the options that jax and XLA read once, when they first look for devices."""
    if device.platform != "auto":
        # List the CPU too: with "cuda" as the only platform and no plugin for GPUs, jax 0.10 fails in an assertion.
        platforms = jax.config.values["jax_platforms"] or {"cuda": "cuda,cpu"}.get(device.platform, device.platform)
        if platforms.split(",")[0].replace("gpu", "cuda") != device.platform:
            raise UserError(
                f"device.platform = {device.platform!r}: JAX_PLATFORMS is {platforms!r}; remove one of the two"
            )
        jax.config.update("jax_platforms", platforms)
    if device.collective_timeout_seconds is not None:
        flags = os.environ.get("XLA_FLAGS", "").split()
        timeouts = [f"--{name}={device.collective_timeout_seconds}" for name in COLLECTIVE_TIMEOUTS]
        others = " ".join(flag for flag in flags if flag not in timeouts)  # a second run in this process finds them set
        if named := [name for name in COLLECTIVE_TIMEOUTS if name in others]:
            raise UserError(
                f"device.collective_timeout_seconds = {device.collective_timeout_seconds}: XLA_FLAGS sets "
                f"{' and '.join(named)} too; remove one of the two"
            )
        os.environ["XLA_FLAGS"] = " ".join([others, *timeouts]).strip()


def open_devices(device: DeviceOptions) -> None:
    """Open the devices of this process, and no other GPU: jax would allocate memory on each one that it sees."""
    if device.gpus is not None:
        visible = jax.config.values["jax_cuda_visible_devices"]
        ids = [str(i) for i in range(visible_gpus(os.environ))] if visible == "all" else visible.split(",")
        if device.gpus <= len(ids):
            jax.config.update("jax_cuda_visible_devices", ",".join(ids[: device.gpus]))
    try:
        backend = jax.default_backend().replace("gpu", "cuda")
    except RuntimeError as error:  # jax's text names the missing platform and the remedy
        raise UserError(f"device.platform = {device.platform!r}: {error}") from error
    if device.platform not in ("auto", backend):
        raise UserError(
            f"device.platform = {device.platform!r}: jax runs on {backend!r} here: it has no plugin for that platform "
            "(pip install 'jaxtune[cuda12]'), or was initialized before this option was read"
        )
    if device.collective_timeout_seconds is not None and backend != "cuda":
        raise UserError(
            f"device.collective_timeout_seconds = {device.collective_timeout_seconds}: XLA has these limits only for "
            "GPUs; train.hang_seconds works on every device"
        )


def devices(device: DeviceOptions) -> list[Any]:
    """The devices of a run's mesh. Raises UserError if a process has fewer than `device.gpus`."""
    by_process: dict[int, list[Any]] = {}
    for one in jax.devices():
        by_process.setdefault(one.process_index, []).append(one)
    for process, process_devices in by_process.items():
        if device.gpus is not None and len(process_devices) < device.gpus:
            count = f"process {process} has {len(process_devices)} devices ({process_devices[0].platform})"
            raise UserError(f"device.gpus = {device.gpus}: {count}")
    return [one for process_devices in by_process.values() for one in process_devices[: device.gpus]]


def facts(config: Config) -> dict[str, str]:
    """Everything that must be the same in all processes of a run, by name: versions, code, plugins, options."""
    options = jax.tree_util.tree_leaves_with_path(as_dict(config), is_leaf=lambda leaf: leaf is None)
    code = (Path(__file__).parents[1], Path(str(pallas_kernels.__file__)).parent)
    return {
        **{name: version(name) for name in ("jax", "jaxlib")},
        "code of jaxtune": digest(code),
        **{f"content of {name}": content for name, content in plugins.content_hashes(config).items()},
        **{jax.tree_util.keystr(path, simple=True, separator="."): repr(value) for path, value in options},
    }


def digest(folders: Iterable[Path]) -> str:
    """A short hash of the Python sources in folders: names and content."""
    hasher = hashlib.sha256()
    for folder in folders:
        for file in sorted(folder.rglob("*.py")):
            hasher.update(f"{file.relative_to(folder)}\0".encode() + file.read_bytes() + b"\0")
    return hasher.hexdigest()[:12]


WAIT_SECONDS = 7 * 24 * 3600  # for the main process: copies and uploads may take long, but they do end
_BARRIERS = itertools.count()  # numbers: a barrier needs a unique name, the same in all processes


def on_main(work: Callable[[], None]) -> None:
    """Run `work` in the main process while the others wait on the host: a collective would time out.

    If it raises UserError in the main process, all processes raise one with its message.
    """
    from orbax.checkpoint.multihost import get_barrier_sync_fn  # Orbax takes long to import

    failure = ""
    if multihost.is_main():
        try:
            work()
        except UserError as error:
            failure = str(error)
    get_barrier_sync_fn()(key=f"jaxtune on_main {next(_BARRIERS)}", timeout_ms=WAIT_SECONDS * 1000)
    multihost.raise_together(failure)


# In XLA's errors: collective libraries, or a service that does not answer. jax raises them as JaxRuntimeError, which is
# a RuntimeError, or as ValueError if a collective fails while a program is being called.
_OF_COLLECTIVES = ("Gloo", "NCCL", "UNAVAILABLE")


@contextmanager
def exit_after_failure() -> Iterator[None]:
    """If this process fails and there are others, end it within LEAVE_SECONDS.

    At exit jax would wait minutes for the other processes, and they may wait for this one in a collective. If all fail
    in the same way, they end immediately. If a collective failed, mostly because another process has ended, one line
    says so, and the exit code is 1, so that launchers restart all processes.
    """
    try:
        yield
    except BaseException as error:
        if jax.process_count() > 1:
            code = REFUSED if isinstance(error, UserError) else 1
            leave = threading.Timer(LEAVE_SECONDS, os._exit, (code,))
            leave.daemon = True
            leave.start()
            if isinstance(error, RuntimeError | ValueError) and any(sign in str(error) for sign in _OF_COLLECTIVES):
                problem = f"process {jax.process_index()}: a collective with the other processes failed: {error}"
                advice = "If one of them has ended, its log says why. A restart continues from the last checkpoint"
                print(f"jaxtune: error: {' '.join(problem.split())}. {advice}", file=sys.stderr, flush=True)
                raise SystemExit(1) from error
        raise


class _Terminal(logging.StreamHandler):
    """Log lines on the terminal. Errors of writing them, such as a closed pipe, end the command."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Raise the exception that `emit` has caught."""
        raise


_SHOWN = ("jaxtune", "pallas_kernels")


def _show_log(options: LogOptions) -> None:
    """Show the log of jaxtune and its kernels: all of the main process, warnings (log.every_process: all) of others."""
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
    """In this context, append to log.file all lines that the main process shows, with times, and a UserError."""
    if config.log.file is None or not multihost.is_main():
        yield
        return
    file = folder / Path(config.log.file).expanduser()  # an absolute path replaces the folder
    file.parent.mkdir(parents=True, exist_ok=True)
    written = logging.FileHandler(file, encoding="utf-8", delay=True)
    written.setFormatter(LogFormatter("%(asctime)s  %(message)s", "%Y-%m-%d %H:%M:%S"))
    loggers = [*map(logging.getLogger, _SHOWN), FILE]
    FILE.propagate = False
    FILE.setLevel(logging.INFO)
    FILE.addFilter(without_secrets)
    for logger in loggers:
        logger.addHandler(written)
    for line in config.startup_notes:  # shown before the folder was known
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
