"""Checks at the start for things that a run needs only later: optional packages, and writable folders."""

import importlib.util
import tempfile
from pathlib import Path

from jaxtune.config.schema import Config
from jaxtune.data.rows.splits import cache_folder
from jaxtune.errors import UserError
from jaxtune.host import process
from jaxtune.host.run_folder import RunFolder
from jaxtune.monitor import metrics
from jaxtune.monitor.gpus import Gpus
from pallas_kernels.flash_attention.packages import fa3, flash


def check_ready(config: Config, folder: RunFolder) -> None:
    """Raise UserError if a package or a login is missing, or a folder is not writable."""
    process.on_main(lambda: _check(config, folder))


def check_writable(folder: Path, option: str) -> None:
    """Raise UserError if a folder is not writable; the folder need not exist yet.

    option: the option that names the folder, for the message.
    """
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(b"\0")
    except OSError as error:
        raise UserError(f"{option}: cannot write to {existing}: {error.strerror or error}") from error


def _check(config: Config, folder: RunFolder) -> None:
    metrics.check_outputs(config.log)
    if config.log.gpu_every:
        Gpus()
    attention = config.attention
    package = {"fa3": fa3, "flash": flash}.get(attention.backend)
    if package is not None and attention.fallback == "error" and importlib.util.find_spec(package.PACKAGE) is None:
        raise UserError(f"attention.backend={attention.backend!r} needs the package {package.INSTALL}")
    for path in (folder.path, folder.export, folder.merged):
        check_writable(path, f"train.output_dir={config.train.output_dir}")
    check_writable(cache_folder(config), f"data.cache_dir={config.data.cache_dir or cache_folder(config)}")
    checkpoints = folder.checkpoints if config.ckpt.dir is None else Path(config.ckpt.dir) / folder.path.name
    check_writable(checkpoints, f"ckpt.dir={config.ckpt.dir or folder.checkpoints}")
