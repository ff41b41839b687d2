"""A lock on a folder, so that only one run or export at a time writes to it. The lock file names its holder.

A killed process does not keep the lock.

The operating system's lock on the file (flock) tells whether a living process on this host holds it. Not every shared
file system supports flock or enforces it across hosts, so the holder also touches the file. If flock cannot tell, the
holder counts as alive until its last touch is TAKE_OVER_SECONDS old.
"""

import contextlib
import fcntl
import json
import logging
import os
import socket
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from jax.experimental import multihost_utils

from jaxtune.errors import UserError
from jaxtune.parallel import multihost

log = logging.getLogger("jaxtune")
TOUCH_SECONDS = 30
POLL_SECONDS = 2
TAKE_OVER_SECONDS = 600
SEEN_SECONDS = 60  # NFS may show a new file to other hosts this much later


@contextmanager
def hold_lock(
    folder: Path, name: str = "lock", otherwise: str = "choose another --config.train.run_name"
) -> Iterator[None]:
    """Hold the lock file `name` in a folder, which is created if necessary. The processes of a run share one lock.

    The main process takes the lock. A killed process leaves the file behind, but without its lock.

    Args:
        folder: The folder to lock.
        name: Name of the lock file.
        otherwise: Alternative to waiting, for the error message.

    Raises:
        UserError: Another process holds the lock; the message names the process, its host and since when. Or a process
            of this run does not see the lock file, because the hosts do not share the folder.
    """
    path = folder / name
    with multihost.write_together(folder):
        file = _take(path, otherwise) if multihost.is_main() else None
    mark = multihost_utils.broadcast_one_to_all(np.int32(0 if file is None else _mark(path)))
    ended = threading.Event()
    touching = threading.Thread(target=_touch, args=(file, ended), daemon=True)
    if file is not None:
        touching.start()
    try:
        blind = np.flatnonzero(multihost_utils.process_allgather(np.bool_(not _sees(path, mark))))
        if blind.size:
            raise UserError(
                f"process {', '.join(map(str, blind))} does not see what process 0 has written to {folder}: "
                "train.output_dir must be on storage that all hosts share"
            )
        yield
    finally:
        ended.set()
        if file is not None:
            touching.join()  # first, because the number of the closed file may be reused for another file
            path.unlink(missing_ok=True)  # before the lock is released, so that a waiting process sees a new file
            os.close(file)


def _take(path: Path, otherwise: str) -> int:
    """Return the open, locked file. Waits to see if a holder on another host is alive.

    Raises UserError if another process holds the lock.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    seen = None
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        held = _try_lock(file)
        if not _is(file, path):
            os.close(file)  # the holder has just ended and removed the file
            continue
        holder, touched = _holder(os.pread(file, 4096, 0)), os.fstat(file).st_mtime
        ended_here = not held and (not holder or (held is False and holder.get("host") == socket.gethostname()))
        if ended_here or (not held and time.time() - touched > TAKE_OVER_SECONDS):
            this_process = {"process": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%F %T %Z")}
            os.ftruncate(file, 0)
            os.pwrite(file, json.dumps(this_process).encode(), 0)
            os.fsync(file)  # because processes on other hosts read the file while it is open here
            return file
        os.close(file)
        who = " ".join(f"{name} {value}" for name, value in holder.items()) or "a process that is just starting"
        if held or (seen is not None and touched != seen):
            raise UserError(f"{path.parent} is in use: {who}. Wait for it, stop it, or {otherwise}")
        if seen is None:
            log.warning(
                "%s was locked by %s; waiting to see if it is alive, until %d minutes after its last sign of life",
                *(path.parent, who, TAKE_OVER_SECONDS // 60),
            )
        seen = touched
        time.sleep(POLL_SECONDS)


def _mark(path: Path) -> int:
    """Return a checksum of a lock file's content, as a non-negative 32-bit integer."""
    return zlib.crc32(path.read_bytes()) >> 1


def _sees(path: Path, mark: int) -> bool:
    """Whether this process sees the lock file of the main process, within SEEN_SECONDS."""
    deadline = time.monotonic() + SEEN_SECONDS
    while not (path.exists() and _mark(path) == mark):
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_SECONDS)
    return True


def _holder(content: bytes) -> dict[str, Any]:
    """Parse a lock file's content; {} if it is empty, or incomplete because the power failed during a write."""
    try:
        return dict(json.loads(content or b"{}"))
    except (ValueError, TypeError):
        return {}


def _try_lock(file: int) -> bool | None:
    """Lock the file and return False, or True if a living process holds it; None if the file system has no flock."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    return False


def _is(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False


def _touch(file: int, ended: threading.Event) -> None:
    while not ended.wait(TOUCH_SECONDS):
        with contextlib.suppress(OSError):  # the file server may be unreachable for a while
            os.utime(file)
