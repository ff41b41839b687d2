"""Settings that are made before the first device is touched."""

import logging
import os
import sys
from pathlib import Path

import jax

from jaxtune.config.schema import Config
from jaxtune.parallel import multihost


def configure(config: Config) -> None:
    """Join the other processes, and keep compiled programs for the next start."""
    multihost.initialize()
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        jax.config.update("jax_compilation_cache_dir", str(Path(config.train.output_dir) / "cache" / "xla"))


def show_log() -> None:
    """What jaxtune and its kernels log on the terminal, of the main process alone; warnings of every process."""
    for name in ("jaxtune", "pallas_kernels"):
        logger = logging.getLogger(name)
        logger.handlers = [logging.StreamHandler(sys.stdout)]
        logger.propagate = False
        logger.setLevel(logging.INFO if multihost.is_main() else logging.WARNING)
