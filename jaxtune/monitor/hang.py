"""Ends a process that hangs: its main thread waits forever, for a collective or for a file system.

If one process of a run has stopped, the others wait for it in the next collective, and no exception ends that wait.
"""

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax

from jaxtune.monitor.goodput import Goodput

TICK_SECONDS = 1
LEAVE_SECONDS = 5  # time to write the stacks


@contextmanager
def exit_when_hung(goodput: Goodput, seconds: int | None, stacks: Path) -> Iterator[None]:
    """In this context, end the process with exit code 1 if `goodput` does not move for `seconds`; None: never.

    It prints one line to stderr and writes the stacks of all threads to a file. Time in which this process itself is
    stopped, as by Ctrl-Z, does not count.
    """
    ended = threading.Event()
    if seconds is not None:
        threading.Thread(target=_watch, args=(goodput, seconds, stacks, ended), name="hang watch", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def _watch(goodput: Goodput, seconds: int, stacks: Path, ended: threading.Event) -> None:
    seen, quiet = goodput.now, 0
    while quiet < seconds:
        if ended.wait(TICK_SECONDS):
            return
        before, seen = seen, goodput.now
        # Ticks are counted, because a clock would include time in which this process was stopped.
        quiet = quiet + TICK_SECONDS if seen == before else 0
    sys.stderr.write(
        f"\njaxtune: process {jax.process_index()} hangs in {seen[0]!r}: nothing has ended for {seconds} s "
        f"(train.hang_seconds); the stacks of its threads are in {stacks}\n"
    )
    sys.stderr.flush()
    # In a separate thread, because the file system itself may hang.
    threading.Thread(target=_write, args=(stacks,), daemon=True).start()
    # The other processes hang as well and write theirs: when process 0 has ended, jax aborts them.
    time.sleep(LEAVE_SECONDS)
    os._exit(1)  # sys.exit would end only this thread


def _write(stacks: Path) -> None:
    with stacks.open("w") as file:
        faulthandler.dump_traceback(file, all_threads=True)
