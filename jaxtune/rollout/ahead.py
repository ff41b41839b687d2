"""Rollouts of later steps, made while the devices train."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

from jaxtune.data.rows.prompt_feed import PromptBatch
from jaxtune.rollout.groups import Rollout

# (weights, prompts of a step) -> a rollout of each prompt.
MakeGroups = Callable[[Any, PromptBatch], list[Rollout]]


class RolloutsAhead:
    """Makes the rollouts of steps in a thread, in order, from the weights with which each was asked for.

    `make` must not run programs on the devices: programs of two threads, on several devices, may wait for each other.
    The thread is a daemon: a run that stops does not wait for what it asked for, and asks again when it resumes.
    """

    def __init__(self, make: MakeGroups):
        self._make = make
        self._asked: dict[int, Future[list[Rollout]]] = {}  # by the number of a step's first completion
        self._jobs: SimpleQueue[tuple[Future[list[Rollout]], Any, PromptBatch] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def get(self, prepare: Callable[[], Any], prompts: PromptBatch) -> tuple[list[Rollout], float]:
        """Return the rollouts of a step, and the seconds for which they were awaited.

        First ask for the rollouts of the `later` steps that were not asked for yet.

        prepare: returns the weights to sample from; called only if a step needs them.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="rollouts ahead", daemon=True)
            self._thread.start()
        if new := [batch for batch in (prompts, *prompts.later) if batch.first not in self._asked]:
            weights = prepare()
            for batch in new:
                self._asked[batch.first] = Future()
                self._jobs.put((self._asked[batch.first], weights, batch))
        begun = time.perf_counter()
        return self._asked.pop(prompts.first).result(), time.perf_counter() - begun

    def close(self) -> None:
        """Drop what was asked for, and let the thread end; call it after what `make` waits for was dropped, too."""
        for future in self._asked.values():
            future.cancel()
        self._jobs.put(None)

    def _work(self) -> None:
        failed = False
        while not failed and (job := self._jobs.get()) is not None:
            future, weights, prompts = job
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(self._make(weights, prompts))
                except BaseException as error:  # raised by `get`, which ends the run: no later rollouts are made
                    future.set_exception(error)
                    failed = True
            del job, future, weights, prompts  # while the thread waits
