"""What a model made of the documents once, before the first step: arrays in the folder of tokenised documents."""

import os
import socket
from collections.abc import Callable
from pathlib import Path

import numpy as np
from jax.experimental import multihost_utils

from jaxtune.errors import UserError


def kept(file: Path, write: Callable[[Path], None]) -> np.ndarray:
    """The array in a .npy file, mapped into memory.

    write: makes it at the path that it is given. All processes call it where one lacks the file, as hosts may have
    folders of their own: what it computes, it computes with the others. Raises UserError where the file is damaged.
    """
    if not multihost_utils.process_allgather(np.int32(file.exists())).all():
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_suffix(f".{socket.gethostname()}.{os.getpid()}.tmp")
        write(unfinished)
        unfinished.rename(file)
    try:
        return np.load(file, mmap_mode="r")
    except (EOFError, ValueError) as error:
        raise UserError(f"{file} is damaged; delete it") from error
