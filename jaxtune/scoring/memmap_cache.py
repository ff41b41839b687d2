"""Cache of arrays that a model computes from the documents once, before the first step.

The files are in the folder of tokenised documents.
"""

import hashlib
import logging
import os
import socket
from collections.abc import Callable
from pathlib import Path

import numpy as np
from jax.experimental import multihost_utils

from jaxtune.data.cache.documents import explain_full_disk

log = logging.getLogger("jaxtune")

_CHECKSUM_BYTES = hashlib.sha256().digest_size


def load_or_compute(file: Path, write: Callable[[Path], None]) -> np.ndarray:
    """Return the memory-mapped array of a .npy file, computed with `write` if the file is missing or damaged.

    The file holds the array and then its SHA-256.

    `write` computes the array and writes it to the path it is given. If the file is missing or damaged in one process,
    all processes call `write`, because it computes collectively and hosts may have separate folders.
    """
    intact = file.exists() and _agrees(file)
    if file.exists() and not intact:
        log.warning("%s is damaged (it does not agree with its checksum), so it is computed again", file)
    if not multihost_utils.process_allgather(np.int32(intact)).all():
        file.parent.mkdir(parents=True, exist_ok=True)
        # Write to a name of this process and rename, so that no other process reads half a file.
        unfinished = file.with_suffix(f".{socket.gethostname()}.{os.getpid()}.tmp")
        with explain_full_disk(file.parent):
            write(unfinished)
            with unfinished.open("r+b") as stream:
                checksum = hashlib.file_digest(stream, "sha256").digest()
                stream.write(checksum)
                stream.flush()
                os.fsync(stream.fileno())
        unfinished.rename(file)
    return np.load(file, mmap_mode="r")  # reads only the bytes that the header announces


def _agrees(file: Path) -> bool:
    """Whether a file ends in the checksum of its other content."""
    if file.stat().st_size <= _CHECKSUM_BYTES:
        return False
    content = np.memmap(file, np.uint8, "r")
    return hashlib.sha256(content[:-_CHECKSUM_BYTES].data).digest() == content[-_CHECKSUM_BYTES:].tobytes()
