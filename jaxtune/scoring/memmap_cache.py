"""What a model made of the documents once, before the first step: arrays in the folder of tokenised documents."""

import hashlib
import logging
import os
import socket
from collections.abc import Callable
from pathlib import Path

import numpy as np
from jax.experimental import multihost_utils

from jaxtune.data.cache.documents import full_disk_is_named

log = logging.getLogger("jaxtune")

_CHECKSUM_BYTES = hashlib.sha256().digest_size


def kept(file: Path, write: Callable[[Path], None]) -> np.ndarray:
    """The array in a .npy file, mapped into memory. After the array the file holds its SHA-256.

    write: makes it at the path that it is given. All processes call it where one lacks the file or has a damaged one,
    as hosts may have folders of their own: what it computes, it computes with the others.
    """
    whole = file.exists() and _agrees(file)
    if file.exists() and not whole:
        log.warning("%s is damaged (it does not agree with its checksum), so it is computed again", file)
    if not multihost_utils.process_allgather(np.int32(whole)).all():
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_suffix(f".{socket.gethostname()}.{os.getpid()}.tmp")
        with full_disk_is_named(file.parent):
            write(unfinished)
            with unfinished.open("r+b") as stream:
                checksum = hashlib.file_digest(stream, "sha256").digest()
                stream.write(checksum)
                stream.flush()
                os.fsync(stream.fileno())
        unfinished.rename(file)
    return np.load(file, mmap_mode="r")


def _agrees(file: Path) -> bool:
    """Whether a file ends in the checksum of what stands before it."""
    if file.stat().st_size <= _CHECKSUM_BYTES:
        return False
    content = np.memmap(file, np.uint8, "r")
    return hashlib.sha256(content[:-_CHECKSUM_BYTES].data).digest() == content[-_CHECKSUM_BYTES:].tobytes()
