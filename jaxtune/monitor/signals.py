"""Stop requests for a run: SIGTERM and Ctrl-C, or an early end on which all processes agree."""

import enum
import os
import signal
import socket
import sys
import threading
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
import rich.console

_HANDLED = (signal.SIGTERM, signal.SIGINT)
_CLOSE = 0  # not the number of any signal


class StopReason(enum.IntEnum):
    """The request of a process; if processes differ, the largest value counts."""

    NOTHING = 0
    END = 1  # the run is finished
    STOP = 2  # save and exit, to continue later


class StopRequest:
    """Records stop requests in a context: `with StopRequest() as stop:`.

    The first SIGTERM or Ctrl-C prints a line and records the request; a Ctrl-C after that ends the process immediately,
    with exit code 130. Enter the context after `multihost.initialize`. Python handles signals only in the main thread:
    in another thread, as in a Ray worker, requests are ignored.
    """

    def __init__(self) -> None:
        self._wished = threading.Event()
        self._previous: dict[int, Any] = {}  # handlers before this context
        self._agreement: jax.Array | None = None  # from the previous step

    def is_requested(self) -> bool:
        """Whether this process got a stop request. Other processes may not have: to act on requests, use `agree`."""
        return self._wished.is_set()

    def agree(self, end: bool = False) -> StopReason:
        """The largest request of all processes, by signals or by `end`; every process must call this in each step.

        With several processes, the answer is from the requests of the previous call, so that no step waits for
        communication.
        """
        request = StopReason.STOP if self.is_requested() else StopReason.END if end else StopReason.NOTHING
        if jax.process_count() == 1:
            return request
        before, self._agreement = self._agreement, _largest_request(request)
        return StopReason.NOTHING if before is None else StopReason(int(before))

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            return self
        # Python runs signal handlers only between two bytecodes of the main thread, and XLA may compile for minutes
        # before the next one. The wake-up socket gets the signal's number immediately, and a separate thread reads it.
        self._receiver, self._sender = socket.socketpair()
        self._sender.setblocking(False)
        self._thread = threading.Thread(target=self._answer, name="signals", daemon=True)
        self._thread.start()
        self._previous_wakeup = signal.set_wakeup_fd(self._sender.fileno())
        self._previous = {number: signal.signal(number, lambda *_: None) for number in _HANDLED}
        return self

    def __exit__(self, *_: object) -> None:
        if not self._previous:
            return
        for number, handler in self._previous.items():
            # None: the previous handler was not installed from Python and cannot be restored.
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
                _say(f"{name}: stopping after this step and saving; Ctrl-C again leaves at once, without saving")
            elif number == signal.SIGINT:
                _say("Ctrl-C: leaving at once")
                rich.console.Console().show_cursor()  # hidden by the progress bar
                os._exit(128 + signal.SIGINT)


def _say(line: str) -> None:
    """Print a line to stderr, below the ^C that the terminal shows."""
    sys.stderr.write(f"\njaxtune: {line}\n")
    sys.stderr.flush()


def _largest_request(request: StopReason) -> jax.Array:
    """The largest request of all processes, as an array on every device; computed after the work queued there."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("device",))
    sharding = jax.sharding.NamedSharding(mesh, jax.P("device"))
    requests = jax.make_array_from_callback((mesh.size,), sharding, lambda _: np.array([request], np.int32))
    with jax.set_mesh(mesh):
        return _largest(requests)


# At module level, so that it is compiled only once.
_largest = jax.jit(jnp.max, out_shardings=jax.P())
