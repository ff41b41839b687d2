"""Calls of the user's tools and environments: those that are asynchronous side by side, each with a time limit."""

import asyncio
import inspect
import queue
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any


class CallTookTooLong(Exception):
    """A call did not return within its time limit."""


class Caller:
    """Calls functions from coroutines that share an event loop.

    Asynchronous functions run side by side. Other functions run one after another in one thread, so that the user's
    code needs no locks and runs in the same order each time. A function that takes too long is left alone: its thread
    cannot be ended, so another one takes the calls after it.
    """

    def __init__(self, seconds: float):
        """`seconds`: time limit of a call."""
        self._seconds = seconds
        self._loop = asyncio.new_event_loop()
        self._lock = asyncio.Lock()
        self._worker = _Worker()
        # Daemon threads: a call that never returns must not keep the process from ending.
        threading.Thread(target=self._loop.run_forever, name="environments", daemon=True).start()

    def run_all(self, jobs: Sequence[Coroutine[Any, Any, None]]) -> None:
        """Run coroutines side by side, until the last one returns."""

        async def all_of_them() -> None:
            await asyncio.gather(*jobs)

        asyncio.run_coroutine_threadsafe(all_of_them(), self._loop).result()

    async def call(self, function: Callable[..., Any], /, *args: Any, **arguments: Any) -> Any:
        """Call a function, asynchronous or not, from a coroutine of `run_all`; its arguments may have any name.

        Raises:
            CallTookTooLong: it took longer than the time limit.
            Exception: whatever the function raises; RuntimeError for SystemExit.
        """
        if inspect.iscoroutinefunction(function):
            return await self._within(asyncio.ensure_future(_without_exit(function(*args, **arguments))))
        async with self._lock:
            try:
                future = self._worker.submit(lambda: function(*args, **arguments))
                return await self._within(asyncio.wrap_future(future))
            except CallTookTooLong:
                self._worker = _Worker()
                raise

    async def _within(self, future: asyncio.Future[Any]) -> Any:
        done, _ = await asyncio.wait({future}, timeout=self._seconds)
        if not done:
            future.cancel()
            raise CallTookTooLong(f"took more than {self._seconds:g} seconds")
        return future.result()


async def _without_exit(running: Coroutine[Any, Any, Any]) -> Any:
    try:
        return await running
    except SystemExit as error:  # it would end the event loop
        raise RuntimeError(f"exits: {error}") from error


class _Worker:
    """A thread that runs functions one after another."""

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="environment calls", daemon=True).start()

    def submit(self, function: Callable[[], Any]) -> Future[Any]:
        """Return the future result of a function."""
        future: Future[Any] = Future()
        self._waiting.put((function, future))
        return future

    def _run(self) -> None:
        while True:
            function, future = self._waiting.get()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function())
            except SystemExit as error:  # it would end the event loop, which gets this exception
                future.set_exception(RuntimeError(f"exits: {error}"))
            except BaseException as error:  # the user's function can fail in any way
                future.set_exception(error)
