"""One run at a time writes to its folder, and one export to its: a lock that says who holds it.

A killed process does not keep it.

The operating system's lock on the file (flock) tells whether a living process of this host holds it. Not every shared
file system has it, or carries it to other hosts, so the holder also touches the file: where flock cannot tell, it
counts as alive until its last touch is TAKE_OVER_SECONDS old.
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
REFUSED = -1
SEEN_SECONDS = 60  # NFS may show a new file to other hosts that much later


@contextmanager
def locked(
    folder: Path, name: str = "lock", otherwise: str = "choose another --config.train.run_name"
) -> Iterator[None]:
    """Holds the file `name` in a folder, which is made if need be. The processes of one run share it.

    The main process takes it. A process that is killed leaves the file there, without its lock.

    Args:
        folder: what is locked.
        name: of the file.
        otherwise: what the user may do instead of waiting.

    Raises:
        UserError: Another process holds it; says which process, where and since when. Or a process of this run does
            not see it: checkpoints need one folder for all.
    """
    path = folder / name
    file, refusal = _take(path, otherwise) if multihost.is_main() else (None, None)
    mark = multihost_utils.broadcast_one_to_all(np.int32(REFUSED if file is None else _mark(path)))
    if mark == REFUSED:
        raise refusal or UserError(f"{folder} is in use: process 0 says by whom")
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
            touching.join()  # or it would touch another file of that number
            path.unlink(missing_ok=True)  # before its lock is released: who waits finds another file
            os.close(file)


def _take(path: Path, otherwise: str) -> tuple[int | None, UserError | None]:
    """The open, locked file; or why it cannot be taken. Waits to see whether a holder on another host is alive."""
    path.parent.mkdir(parents=True, exist_ok=True)
    seen = None
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        held = _held(file)
        if not _is(file, path):
            os.close(file)  # its holder has just ended, and removed the file
            continue
        holder, touched = _holder(os.pread(file, 4096, 0)), os.fstat(file).st_mtime
        ended_here = not held and (not holder or (held is False and holder.get("host") == socket.gethostname()))
        if ended_here or (not held and time.time() - touched > TAKE_OVER_SECONDS):
            own = {"process": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%F %T %Z")}
            os.ftruncate(file, 0)
            os.pwrite(file, json.dumps(own).encode(), 0)
            os.fsync(file)  # for the processes on other hosts, which read it while it is open here
            return file, None
        os.close(file)
        who = " ".join(f"{name} {value}" for name, value in holder.items()) or "a process that is just starting"
        if held or (seen is not None and touched != seen):
            return None, UserError(f"{path.parent} is in use: {who}. Wait for it, stop it, or {otherwise}")
        if seen is None:
            log.warning(
                "%s was locked by %s; waiting for its next sign of life, or %d minutes after its last",
                *(path.parent, who, TAKE_OVER_SECONDS // 60),
            )
        seen = touched
        time.sleep(POLL_SECONDS)


def _mark(path: Path) -> int:
    """What a lock says, as a number that is not negative."""
    return zlib.crc32(path.read_bytes()) >> 1


def _sees(path: Path, mark: int) -> bool:
    """Whether this process sees the lock that the main one holds."""
    deadline = time.monotonic() + SEEN_SECONDS
    while not (path.exists() and _mark(path) == mark):
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_SECONDS)
    return True


def _holder(content: bytes) -> dict[str, Any]:
    """What a lock file says of its holder; empty where it says nothing, or was half written when the power went."""
    try:
        return dict(json.loads(content or b"{}"))
    except (ValueError, TypeError):
        return {}


def _held(file: int) -> bool | None:
    """Whether a living process of this host holds the file, else it is ours; None: the file system has no flock."""
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
        with contextlib.suppress(OSError):  # of a file server that is away for a while: the next touch may succeed
            os.utime(file)
