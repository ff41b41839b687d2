"""Ctrl-C in a command: prints one line and exits immediately with code 130, even during imports and compilation.

Python raises KeyboardInterrupt only between two bytecodes of the main thread. This gives a traceback while modules are
imported, comes minutes late while XLA compiles, and is lost if it is raised while jax clears its caches. While steps
run, `monitor.signals` handles Ctrl-C instead, and saves first.
"""

import os
import signal
import socket
import sys
import threading
from itertools import pairwise


def is_command() -> bool:
    """Whether this process was started as `python -m jaxtune...` or `jaxtune`, so that jaxtune may handle Ctrl-C."""
    as_module = any(flag == "-m" and name.split(".")[0] == "jaxtune" for flag, name in pairwise(sys.orig_argv))
    return as_module or os.path.basename(sys.argv[0]) == "jaxtune"


def leave_at_once() -> None:
    """Make Ctrl-C end the process from now on. Call this in the main thread."""
    # Python's C-level signal handler writes the signal's number to this socket even while the main thread is busy.
    receiver, sender = socket.socketpair()
    sender.setblocking(False)

    def wait_for_interrupt() -> None:
        while sender and receiver.recv(1)[0] != signal.SIGINT:
            pass
        # The escape sequence shows the cursor again, which a progress bar hides.
        os.write(2, b"\x1b[?25h" * sys.stderr.isatty() + b"\njaxtune: interrupted\n")
        os._exit(128 + signal.SIGINT)

    threading.Thread(target=wait_for_interrupt, name="Ctrl-C", daemon=True).start()
    signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGINT, lambda *_: None)
