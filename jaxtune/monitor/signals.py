"""Stopping a run from outside: SIGTERM and Ctrl-C."""

import os
import signal
import socket
import sys
import threading
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np
import rich.console

_HANDLED = (signal.SIGTERM, signal.SIGINT)
_CLOSE = 0  # no signal has this number


class StopRequest:
    """A wish to stop, noted while the context lasts: `with StopRequest() as stop:`.

    The first SIGTERM or Ctrl-C prints a line and sets the wish; a Ctrl-C after that ends the process at once, with exit
    code 130. Enter it in the main thread and after `multihost.initialize`.
    """

    def __init__(self) -> None:
        self._wished = threading.Event()
        self._agreement: jax.Array | None = None  # of the step before

    def requested(self) -> bool:
        """Whether this process was asked to stop. Others may not know of it: to act on it, use `agree`."""
        return self._wished.is_set()

    def agree(self) -> bool:
        """Whether any process was asked to stop: the same answer in all of them; every process calls it once a step.

        With several processes the answer is that of the call before, so that no step waits for its own.
        """
        if jax.process_count() == 1:
            return self.requested()
        before, self._agreement = self._agreement, _any_process(self.requested())
        return before is not None and bool(before)

    def __enter__(self) -> Self:
        # Python runs handlers only between two bytecodes of the main thread, and XLA may compile for minutes before the
        # next one. The signal's number is in the socket at once, and a thread of its own answers it.
        self._receiver, self._sender = socket.socketpair()
        self._sender.setblocking(False)
        self._thread = threading.Thread(target=self._answer, name="signals", daemon=True)
        self._thread.start()
        self._previous_wakeup = signal.set_wakeup_fd(self._sender.fileno())
        self._previous = {number: signal.signal(number, lambda *_: None) for number in _HANDLED}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            # None: it was not installed from Python, and cannot be from here.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        signal.set_wakeup_fd(self._previous_wakeup)
        self._sender.send(bytes([_CLOSE]))
        self._thread.join()
        self._sender.close()
        self._receiver.close()

    def _answer(self) -> None:
        while (number := self._receiver.recv(1)[0]) != _CLOSE:
            if number not in _HANDLED:
                continue
            if not self._wished.is_set():
                self._wished.set()
                name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
                _say(f"{name}: stopping after this step and saving; Ctrl-C leaves at once without saving")
            elif number == signal.SIGINT:
                _say("Ctrl-C: leaving at once")
                rich.console.Console().show_cursor()  # hidden by the progress bar
                os._exit(128 + signal.SIGINT)


def _say(line: str) -> None:
    """A line of its own on stderr, clear of the terminal's ^C."""
    sys.stderr.write(f"\njaxtune: {line}\n")
    sys.stderr.flush()


def _any_process(flag: bool) -> jax.Array:
    """Whether the flag is set in any process: a bool on every device, computed behind what is already queued there."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("device",))
    sharding = jax.sharding.NamedSharding(mesh, jax.P("device"))
    flags = jax.make_array_from_callback((mesh.size,), sharding, lambda _: np.array([flag]))
    with jax.set_mesh(mesh):
        return _any(flags)


# At the top level, so that it is compiled once.
_any = jax.jit(jnp.any, out_shardings=jax.P())
