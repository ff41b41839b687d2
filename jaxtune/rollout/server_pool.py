"""Several servers of the same model, asked in turn; one that cannot be reached is left out."""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from typing import Any, TypeVar

from jaxtune.errors import UserError, format_count

log = logging.getLogger("jaxtune")
T = TypeVar("T")


class Unreachable(UserError):
    """A server that does not answer."""


class ServerPool:
    """The addresses of servers that have answered so far. Threads may share it."""

    def __init__(self, urls: Sequence[str]):
        self._urls, self._lock = list(urls), threading.Lock()
        self._awaited: set[Future[Any]] = set()
        self._closed = False

    def close(self) -> None:
        """Cancel the answers that are awaited, now or later: whoever waits for one gets CancelledError."""
        with self._lock:
            self._closed = True
            for future in self._awaited:
                future.cancel()

    @contextmanager
    def awaiting(self, futures: Sequence[Future[Any]]) -> Iterator[None]:
        """Let `close` cancel these answers of servers."""
        with self._lock:
            self._awaited.update(futures)
        if self._closed:
            self.close()
        try:
            yield
        finally:
            with self._lock:
                self._awaited.difference_update(futures)

    def ask(self, number: int, call: Callable[[str], T]) -> T:
        """Return call(url) of one server, chosen by the number; of another one if it cannot be reached.

        Raises Unreachable if no server is left, and CancelledError after `close`.
        """
        while True:
            if self._closed:
                raise CancelledError
            urls = tuple(self._urls)
            url = urls[number % len(urls)]
            try:
                return call(url)
            except Unreachable as error:
                self._leave_out(url, error)

    def ask_each(self, call: Callable[[str], T]) -> list[T]:
        """Return call(url) of each server that can be reached. Raises as `ask`."""
        answers = []
        for url in tuple(self._urls):
            if self._closed:
                raise CancelledError
            try:
                answers.append(call(url))
            except Unreachable as error:
                self._leave_out(url, error)
        return answers

    def _leave_out(self, url: str, error: Unreachable) -> None:
        with self._lock:
            if url not in self._urls:  # another thread has found out first
                return
            if len(self._urls) == 1:
                raise error
            self._urls.remove(url)
            left = format_count(len(self._urls), "server")
            log.warning("%s; this server is left out until the run ends, which has %s now", error, left)
