"""Ctrl-C in a command: one line and exit code 130, at once, whatever is being imported or compiled.

Python raises KeyboardInterrupt between two bytecodes of the main thread: with a traceback while modules are imported,
minutes late while XLA compiles, and not at all if it lands where jax clears its caches. While steps run,
`monitor.signals` answers instead, and saves first.
"""

import os
import signal
import socket
import sys
import threading
from itertools import pairwise


def is_command() -> bool:
    """Whether this process was started as `python -m jaxtune...` or `jaxtune`; in any other, Ctrl-C is not ours."""
    as_module = any(flag == "-m" and name.split(".")[0] == "jaxtune" for flag, name in pairwise(sys.orig_argv))
    return as_module or os.path.basename(sys.argv[0]) == "jaxtune"


def leave_at_once() -> None:
    """From now on Ctrl-C ends the process. Call it in the main thread."""
    receiver, sender = socket.socketpair()  # gets a signal's number at once, whatever the main thread is doing
    sender.setblocking(False)

    def answer() -> None:
        while sender and receiver.recv(1)[0] != signal.SIGINT:
            pass
        # The escape sequence shows the cursor again, which a progress bar hides.
        os.write(2, b"\x1b[?25h" * sys.stderr.isatty() + b"\njaxtune: interrupted\n")
        os._exit(128 + signal.SIGINT)

    threading.Thread(target=answer, name="Ctrl-C", daemon=True).start()
    signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGINT, lambda *_: None)
