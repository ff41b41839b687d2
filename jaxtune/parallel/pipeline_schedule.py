"""Pipeline schedules: GPipe, 1F1B, and 1F1B with several interleaved chunks in each stage.

All stages run in lockstep, tick by tick. In a tick a stage may run the forward pass of one micro-batch through one of
its chunks of layers, and then the backward pass of one. A chunk's output reaches the next chunk in the next tick.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jaxtune.parallel.manual_axes import with_manual_axes

Order = Literal["gpipe", "1f1b"]


class StageWork(NamedTuple):
    """The forward or the backward passes of all stages in each tick; -1: the stage is idle.

    Attributes:
        micro_batch: number of the micro-batch.
        chunk: number of the chunk in the stage.
        slot: slot of the chunk's input, among the inputs that the stage holds for backward passes.
    """

    micro_batch: Int[np.ndarray, "ticks stages"]
    chunk: Int[np.ndarray, "ticks stages"]
    slot: Int[np.ndarray, "ticks stages"]


class Ticks(NamedTuple):
    """The work of each tick. In the last three fields, -1 is no micro-batch.

    Attributes:
        forward: forward passes.
        backward: backward passes.
        entering: micro-batch whose forward pass begins, in the first chunk of all.
        leaving: micro-batch whose forward pass ends, in the last chunk of all.
        returning: micro-batch whose backward pass ends, in the first chunk of all.
    """

    forward: StageWork
    backward: StageWork
    entering: Int[np.ndarray, " ticks"]
    leaving: Int[np.ndarray, " ticks"]
    returning: Int[np.ndarray, " ticks"]


class Schedule(NamedTuple):
    """The schedule of a step of a pipeline.

    Attributes:
        ticks: the work of each tick.
        slots: the largest number of inputs that a stage holds for backward passes.
        waiting: the largest number of outputs of the last chunk that wait for its backward pass.
    """

    ticks: Ticks
    slots: int
    waiting: int

    @property
    def bubble(self) -> float:
        """The share of a stage's time in which it is idle, if all chunks take the same time."""
        # Backward passes mirror the forward ones, so forward passes suffice, over the ticks in which any stage has one.
        forward = self.ticks.forward.micro_batch >= 0
        return 1 - forward.mean(1)[forward.any(1)].mean().item()


def schedule(stages: int, chunks: int, micro_batches: int, order: Order) -> Schedule:
    """Return the schedule of a step.

    'gpipe' (Huang et al. 2019, arXiv:1811.06965): all forward passes come first, so a stage holds the inputs of every
    micro-batch. '1f1b' (Narayanan et al. 2021, arXiv:2104.04473): the backward pass of a micro-batch begins as soon as
    it has left the last chunk, so the number of inputs that a stage holds does not grow with the number of
    micro-batches. With several chunks in each stage, micro-batches run in groups of as many as there are stages: a
    group goes through one chunk after another, and stages are idle for a shorter time at the start and the end.
    """
    stage, chunk, micro = np.indices((stages, chunks, micro_batches))
    group, place = np.divmod(micro, stages)
    # For each (stage, chunk, micro-batch): its turn among the stage's forward passes, and the ticks of both passes. A
    # group of micro-batches takes a stage stages * chunks turns, and a stage runs a tick behind the stage before it.
    turn = group * stages * chunks + chunk * stages + place
    forward = turn + stage
    # The tick of the first backward pass. In 1F1B it is the tick in which micro-batch 0 leaves the last chunk, because
    # a tick has a forward pass and then a backward pass.
    begin = stages * chunks - 1 if order == "1f1b" else forward.max() + 1
    # The same order with chunks and stages reversed.
    backward = begin + group * stages * chunks + (chunks - 1 - chunk) * stages + place + (stages - 1 - stage)
    ticks = backward.max() + 1
    slots = _fewest(turn, forward, backward)
    last = (slice(stages - 1, None), slice(chunks - 1, None))
    waiting = _fewest(micro[last], forward[last], backward[last])

    def table(tick: np.ndarray, value: np.ndarray) -> np.ndarray:
        by_tick = np.full((ticks, stages), -1)
        by_tick[tick, stage] = value
        return by_tick

    def work(tick: np.ndarray) -> StageWork:
        return StageWork(*(table(tick, value) for value in (micro, chunk, turn % slots)))

    def micro_batch_at(tick: np.ndarray) -> np.ndarray:
        by_tick = np.full(ticks, -1)
        by_tick[tick] = np.arange(micro_batches)
        return by_tick

    ends = micro_batch_at(forward[0, 0]), micro_batch_at(forward[-1, -1]), micro_batch_at(backward[0, 0])
    return Schedule(Ticks(work(forward), work(backward), *ends), slots, waiting)


def _fewest(turn: np.ndarray, begin: np.ndarray, end: np.ndarray) -> int:
    """Return the smallest number of slots, used in turn, with which no stage needs a slot that is still in use."""

    def enough(slots: int) -> bool:
        for stage in range(len(turn)):
            free = np.full(slots, -1)
            for at in np.argsort(begin[stage], axis=None):
                slot = turn[stage].flat[at] % slots
                # <=, because in a tick the forward pass writes its slot before the backward pass reads one.
                if begin[stage].flat[at] <= free[slot]:
                    return False
                free[slot] = end[stage].flat[at]
        return True

    return next(slots for slots in range(1, turn.max() + 2) if enough(slots))


@jax.named_scope("collectives")
def shift_stages(x: Array, stages: int, by: int = 1) -> Array:
    """On the devices of each stage: receive x from the stage before (by=-1: the one after); stages form a ring."""
    return jax.lax.ppermute(x, "stage", [(stage, (stage + by) % stages) for stage in range(stages)])


@jax.named_scope("collectives")
def from_one(x: Array, is_own: Bool[Array, ""]) -> Array:
    """On the devices of each stage: broadcast x from the one stage with `is_own`; zeros if no stage has it.

    The bits are summed as integers, because XLA on CPUs cannot sum bfloat16 over an axis if only that axis is manual.
    """
    own = jnp.where(is_own, x, 0)
    if x.dtype.itemsize < 4:  # the bitcast folds the last axis into a 32-bit word
        own = jnp.reshape(own, (*x.shape[:-1], -1, 4 // x.dtype.itemsize))
    # All stages but one add zeros, so the sum of the words has the bits of x.
    words = jax.lax.psum(jax.lax.bitcast_convert_type(own, jnp.uint32), "stage")
    values = jax.lax.bitcast_convert_type(words, x.dtype)
    # Only folded values are reshaped: with one row, a reshape loses how the axis of rows is sharded.
    return values if x.dtype.itemsize == 4 else jnp.reshape(values, x.shape)


def by_stage(function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """Return the function, run on the devices of each stage: the axis of stages is manual inside.

    It must not be differentiated, as in `with_manual_axes`.
    """
    return with_manual_axes(("stage",), function, in_specs, out_specs)
