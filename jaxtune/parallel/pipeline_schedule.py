"""When each stage of a pipeline computes which micro-batch: GPipe, 1F1B, and 1F1B with interleaved chunks of a stage.

The stages compute in step. In a tick each may send one micro-batch forward through one of its chunks of layers, and
then one backward; what a chunk makes reaches the next chunk in the next tick.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jaxtune.parallel.manual_axes import apart

Order = Literal["gpipe", "1f1b"]


class Work(NamedTuple):
    """What the stages do in each tick; -1 where one does nothing."""

    micro_batch: Int[np.ndarray, "ticks stages"]
    chunk: Int[np.ndarray, "ticks stages"]
    slot: Int[np.ndarray, "ticks stages"]  # of the stage's input, among those that it holds


class Ticks(NamedTuple):
    """What happens in each tick.

    entering, leaving, returning: the micro-batch of which the first chunk takes the input, the last one makes the
    output, and the first one makes the gradient of its input; -1: none.
    """

    forward: Work
    backward: Work
    entering: Int[np.ndarray, " ticks"]
    leaving: Int[np.ndarray, " ticks"]
    returning: Int[np.ndarray, " ticks"]


class Schedule(NamedTuple):
    """A step of a pipeline.

    slots: inputs that a stage holds at most, for its backward passes. waiting: outputs of the last chunk that wait at
    most for its backward pass.
    """

    ticks: Ticks
    slots: int
    waiting: int

    @property
    def bubble(self) -> float:
        """The part of a stage's time in which it waits for others, if all chunks take the same time."""
        forward = self.ticks.forward.micro_batch >= 0
        return 1 - forward.mean(1)[forward.any(1)].mean().item()


def schedule(stages: int, chunks: int, micro_batches: int, order: Order) -> Schedule:
    """The schedule of a step.

    'gpipe' (Huang et al. 2019, arXiv:1811.06965): all forward passes come first, so that a stage holds every
    micro-batch. '1f1b' (Narayanan et al. 2021, arXiv:2104.04473): the backward pass of a micro-batch begins as soon as
    it has left the last chunk, so that what a stage holds does not grow with the number of micro-batches. With several
    chunks in each stage, groups of as many micro-batches as there are stages go through one chunk after another, and a
    stage waits less for the first and the last of them.
    """
    stage, chunk, micro = np.indices((stages, chunks, micro_batches))
    group, place = np.divmod(micro, stages)
    turn = group * stages * chunks + chunk * stages + place  # of a stage's forward passes
    forward = turn + stage
    begin = stages * chunks - 1 if order == "1f1b" else forward.max() + 1
    backward = begin + group * stages * chunks + (chunks - 1 - chunk) * stages + place + (stages - 1 - stage)
    ticks = backward.max() + 1
    slots = _fewest(turn, forward, backward)
    last = (slice(stages - 1, None), slice(chunks - 1, None))
    waiting = _fewest(micro[last], forward[last], backward[last])

    def table(tick: np.ndarray, value: np.ndarray) -> np.ndarray:
        found = np.full((ticks, stages), -1)
        found[tick, stage] = value
        return found

    def work(tick: np.ndarray) -> Work:
        return Work(*(table(tick, value) for value in (micro, chunk, turn % slots)))

    def of(tick: np.ndarray) -> np.ndarray:
        found = np.full(ticks, -1)
        found[tick] = np.arange(micro_batches)
        return found

    ends = of(forward[0, 0]), of(forward[-1, -1]), of(backward[0, 0])
    return Schedule(Ticks(work(forward), work(backward), *ends), slots, waiting)


def _fewest(turn: np.ndarray, begin: np.ndarray, end: np.ndarray) -> int:
    """The fewest slots with which no two of a stage that are held at once have one, if slots are taken in turn."""

    def enough(slots: int) -> bool:
        for stage in range(len(turn)):
            free = np.full(slots, -1)
            for at in np.argsort(begin[stage], axis=None):
                slot = turn[stage].flat[at] % slots
                if begin[stage].flat[at] <= free[slot]:
                    return False
                free[slot] = end[stage].flat[at]
        return True

    return next(slots for slots in range(1, turn.max() + 2) if enough(slots))


def sent(x: Array, stages: int, by: int = 1) -> Array:
    """On the devices of each stage: the x of the stage before; with by=-1 that of the one after. They are a ring."""
    return jax.lax.ppermute(x, "stage", [(stage, (stage + by) % stages) for stage in range(stages)])


def from_one(x: Array, is_own: Bool[Array, ""]) -> Array:
    """On the devices of each stage: the x of the one stage where `is_own`, or zeros where there is none.

    A sum of the bits: XLA's code for CPUs has no sum of bfloat16 over an axis that is manual alone.
    """
    apart = jnp.reshape(jnp.where(is_own, x, 0), (*x.shape[:-1], -1, 4 // x.dtype.itemsize))
    words = jax.lax.psum(jax.lax.bitcast_convert_type(apart, jnp.uint32), "stage")
    return jnp.reshape(jax.lax.bitcast_convert_type(words, x.dtype), x.shape)


def by_stage(function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """The function on the devices of each stage, as if they were all: the axis of stages is manual there.

    As `apart` says: not to be differentiated.
    """
    return apart(("stage",), function, in_specs, out_specs)
