"""Settings of JAX and XLA that are made before the first device is touched."""

import logging
import os
import sys
from pathlib import Path

import jax

from jaxtune.config.schema import Config
from jaxtune.parallel import multihost

# Bit-equal repeats on a GPU: no atomics in scatters and reductions, and no timing that may choose another algorithm.
DETERMINISTIC_FLAGS = ("--xla_gpu_deterministic_ops=true", "--xla_gpu_autotune_level=0")


def configure(config: Config) -> None:
    """Join the other processes, and apply what the config asks of XLA; compiled programs are kept."""
    if config.train.deterministic:
        os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *DETERMINISTIC_FLAGS]).strip()
    multihost.initialize()
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        jax.config.update("jax_compilation_cache_dir", str(Path(config.train.output_dir) / "cache" / "xla"))


def show_log() -> None:
    """Lines of the logger `jaxtune` on the terminal, of the main process alone; warnings of every process."""
    logger = logging.getLogger("jaxtune")
    logger.handlers = [logging.StreamHandler(sys.stdout)]
    logger.propagate = False
    logger.setLevel(logging.INFO if multihost.is_main() else logging.WARNING)
