"""Rollouts of later steps, made while the devices train."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

import jax
import jax.numpy as jnp

from jaxtune.data.rows.prompt_feed import PromptBatch
from jaxtune.models.decoder import Parameters
from jaxtune.rollout.groups import Rollout

# (trained, frozen, prompts of a step) -> a rollout of each prompt.
MakeGroups = Callable[[Parameters, Parameters, PromptBatch], list[Rollout]]


def make_ahead(make: MakeGroups) -> MakeGroups:
    """Return a function that returns what `make` does, and first asks for the rollouts of `later` steps.

    A thread makes them in order, one step after the other, from a copy of the weights at the time they were asked for.
    So those of a step are a few updates old, unless they were not asked for before, as in the first step of a run. The
    thread is a daemon: a run that stops does not wait for what it asked for, and asks for it again when it resumes.
    """
    asked: dict[int, Future[list[Rollout]]] = {}  # by the number of a step's first completion
    jobs: SimpleQueue[tuple[Future[list[Rollout]], tuple[Any, ...]]] = SimpleQueue()
    mesh = jax.sharding.get_mesh()

    def work() -> None:
        jax.set_mesh(mesh)  # of this thread
        while True:
            future, arguments = jobs.get()
            try:
                future.set_result(make(*arguments))
            except BaseException as error:  # raised where the result is awaited
                future.set_exception(error)

    def groups(trained: Parameters, frozen: Parameters, prompts: PromptBatch) -> list[Rollout]:
        new = [batch for batch in (prompts, *prompts.later) if batch.first not in asked]
        weights = jax.tree.map(jnp.copy, trained) if new else {}  # the step donates the weights
        for batch in new:
            asked[batch.first] = Future()
            jobs.put((asked[batch.first], (weights, frozen, batch)))
        return asked.pop(prompts.first).result()

    threading.Thread(target=work, name="rollouts ahead", daemon=True).start()
    return groups
