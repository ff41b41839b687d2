"""One run at a time writes to a run folder: a lock that says who holds it, and that a killed process does not keep.

The operating system's lock on the file (flock) tells whether a living process of this host holds it. Not every shared
file system has it, or carries it to other hosts, so the holder also touches the file: where flock cannot tell, it
counts as alive until its last touch is TAKE_OVER_SECONDS old.
"""

import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from jax.experimental import multihost_utils

from jaxtune.errors import UserError
from jaxtune.parallel import multihost

TOUCH_SECONDS = 30
TAKE_OVER_SECONDS = 600


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds `folder`/lock, which is made if need be. The processes of one run share it: the main one takes it.

    Raises:
        UserError: Another run holds it; says which process, where and since when.
    """
    file, refusal = _take(folder / "lock") if multihost.is_main() else (None, None)
    if multihost_utils.broadcast_one_to_all(np.bool_(refusal is not None)):
        raise refusal or UserError(f"{folder} is in use: process 0 says by whom")
    ended = threading.Event()
    if file is not None:
        threading.Thread(target=_touch, args=(file, ended), daemon=True).start()
    try:
        yield
    finally:
        ended.set()
        if file is not None:
            (folder / "lock").unlink(missing_ok=True)  # before its lock goes: who waits for it finds another file
            os.close(file)


def _take(path: Path) -> tuple[int | None, UserError | None]:
    """The open, locked file; or why it cannot be taken."""
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        held = _held(file)
        if not _is(file, path):
            os.close(file)  # its holder has just ended, and took the file away
            continue
        if refusal := _refusal(path, os.pread(file, 4096, 0), held, time.time() - os.fstat(file).st_mtime):
            os.close(file)
            return None, refusal
        holder = {"process": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%F %T %Z")}
        os.ftruncate(file, 0)
        os.pwrite(file, json.dumps(holder).encode(), 0)
        return file, None


def _refusal(path: Path, content: bytes, held: bool | None, age: float) -> UserError | None:
    """Why a lock file of this content and age is not free; `held` as `_held` says."""
    holder = json.loads(content or b"{}")
    here = holder.get("host") == socket.gethostname() and held is not None
    if not held and (not holder or here or age > TAKE_OVER_SECONDS):
        return None
    who = " ".join(f"{name} {value}" for name, value in holder.items()) or "a process that is just starting"
    patience = f"; if it was killed, its lock ends {TAKE_OVER_SECONDS // 60} minutes after its last sign of life"
    return UserError(
        f"{path.parent} is in use: {who}{'' if held else patience}. "
        "Wait for it, stop it, or choose another --config.train.run_name"
    )


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
        os.utime(file)
