"""Settings of the process: its place among others, its log, its compilation cache, and XLA's options for a GPU."""

import hashlib
import logging
import os
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import jax

import jaxtune
import pallas_kernels
from jaxtune import command
from jaxtune.config.loading import as_dict
from jaxtune.config.schema import Config
from jaxtune.errors import UserError
from jaxtune.parallel import multihost
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
    # What is recomputed is for memory.remat to say. Near the end of the GPU's memory XLA would compute products of the
    # backward pass three times over, and save next to nothing by it.
    "xla_disable_hlo_passes": "rematerialization",
}
OFFLOADING_OPTIONS: Options = {
    # A copy from the host begins while products before its use are computed. XLA's default schedule waits for each.
    "xla_gpu_enable_latency_hiding_scheduler": True,
}
DETERMINISTIC_OPTIONS: Options = {
    # Scatters and reductions without atomics, whose order differs from run to run.
    "xla_gpu_deterministic_ops": True,
    # No algorithm chosen by timing, which may choose another one the next time.
    "xla_gpu_autotune_level": 0,
}


def compiler_options(deterministic: bool = False, offloads: bool = False) -> Options:
    """`compiler_options` of jax.jit for the device of the mesh in use; what XLA_FLAGS names is left as it says.

    offloads: whether arguments are in the host's memory.
    """
    if current_device().platform != "gpu":
        return {}
    options = GPU_OPTIONS | (DETERMINISTIC_OPTIONS if deterministic else {}) | (OFFLOADING_OPTIONS if offloads else {})
    return {name: value for name, value in options.items() if name not in os.environ.get("XLA_FLAGS", "")}


LEAVE_SECONDS = 10
# Fraction of a GPU's memory that XLA takes at the start: by default 0.75, which leaves a quarter of it unused.
MEMORY_FRACTION = "0.93"


def configure(config: Config) -> None:
    """Before the first device is touched: join the other processes, keep compiled programs, show the log.

    The first lines of the log are what the config left out because it could have no effect. Raises UserError where
    other processes have other options, other code or another jax: they would compute something else, or hang.
    """
    if "XLA_PYTHON_CLIENT_MEM_FRACTION" not in os.environ:  # the same by its older name
        os.environ.setdefault("XLA_CLIENT_MEM_FRACTION", MEMORY_FRACTION)
    multihost.initialize()
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        jax.config.update("jax_compilation_cache_dir", str(Path(config.train.output_dir).absolute() / "cache" / "xla"))
    _show_log()
    if jax.process_count() > 1:
        multihost.agree(facts(config))
    for line in config.left_out:
        log.info(line)


def facts(config: Config) -> dict[str, str]:
    """What must be the same in all processes of a run, by name."""
    options = jax.tree_util.tree_leaves_with_path(as_dict(config), is_leaf=lambda leaf: leaf is None)
    code = (Path(str(package.__file__)).parent for package in (jaxtune, pallas_kernels))
    return {
        **{name: version(name) for name in ("jax", "jaxlib")},
        "code of jaxtune": digest(code),
        **{jax.tree_util.keystr(path, simple=True, separator="."): repr(value) for path, value in options},
    }


def digest(folders: Iterable[Path]) -> str:
    """A short hash of the Python sources in folders: names and content."""
    found = hashlib.sha256()
    for folder in folders:
        for file in sorted(folder.rglob("*.py")):
            found.update(f"{file.relative_to(folder)}\0".encode() + file.read_bytes() + b"\0")
    return found.hexdigest()[:12]


@contextmanager
def leaving_after_failure() -> Iterator[None]:
    """Where several processes run and this one fails, it ends, LEAVE_SECONDS later at the latest.

    At exit jax would wait for the others, for minutes, while they may wait for this one in a collective. If all fail
    alike, they end at once.
    """
    try:
        yield
    except BaseException as error:
        if jax.process_count() > 1:
            code = command.REFUSED if isinstance(error, UserError) else 1
            leave = threading.Timer(LEAVE_SECONDS, os._exit, (code,))
            leave.daemon = True
            leave.start()
        raise


class _Terminal(logging.StreamHandler):
    """Log lines on the terminal, whose errors end the command: as a pipe that nobody reads does."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Raises what `emit` has caught."""
        raise


def _show_log() -> None:
    """What jaxtune and its kernels log on the terminal, of the main process alone; warnings of every process."""
    for name in ("jaxtune", "pallas_kernels"):
        logger = logging.getLogger(name)
        logger.handlers = [_Terminal(sys.stdout)]
        logger.propagate = False
        logger.setLevel(logging.INFO if multihost.is_main() else logging.WARNING)
