"""Warp specialisation of the Mosaic GPU kernels for Hopper: one warpgroup streams memory, two multiply by wgmma."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

# Number of workers, and the rows that each computes, which are the rows of a wgmma.
WORKERS, ROWS = 2, 64
# Registers per thread. A multiprocessor has 512 for three threads, one of each warpgroup.
WORKER_REGISTERS, MEMORY_REGISTERS = 240, 24

# Layout over the 128 threads of a warpgroup of a vector with one element per row, or per column, of a product.
PER_ROW, PER_COLUMN = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)


def as_worker(body: Callable) -> None:
    """Run `body(worker)` on the warpgroups that compute."""
    worker = jax.lax.axis_index("warpgroup")

    @pl.when(worker < WORKERS)
    def _():
        plgpu.set_max_registers(WORKER_REGISTERS, action="increase")
        body(worker)


def as_memory(body: Callable) -> None:
    """Run `body()` on the warpgroup that streams memory."""

    @pl.when(jax.lax.axis_index("warpgroup") == WORKERS)
    def _():
        plgpu.set_max_registers(MEMORY_REGISTERS, action="decrease")
        body()


@dataclass(frozen=True)
class Ring:
    """Slots of shared memory: the memory warpgroup fills them in turn, and a slot is free once all workers release it.

    Attributes:
        buffers: arrays in shared memory, each with a slot per stage.
        landed: a barrier per slot, on which the copies into the slot arrive.
        consumed: a barrier per slot, on which the workers arrive when they release the slot.
    """

    buffers: tuple[Any, ...]
    landed: Any
    consumed: Any

    @staticmethod
    def scratch(stages: int, *buffers: Any) -> tuple[Any, ...]:
        """Return the scratch shapes of a ring; each buffer is an array of `stages` slots."""
        landed = plgpu.Barrier(num_arrivals=len(buffers), num_barriers=stages)
        return buffers, landed, plgpu.Barrier(num_arrivals=WORKERS, num_barriers=stages)

    @property
    def stages(self) -> int:
        """The number of slots."""
        return self.buffers[0].shape[0]

    def fill(self, count, *sources) -> None:
        """Copy the count-th block of each source to its buffer, once the slot is free."""
        slot = jax.lax.rem(count, self.stages)
        pl.when(count >= self.stages)(lambda: plgpu.barrier_wait(self.consumed.at[slot]))
        for source, buffer in zip(sources, self.buffers, strict=True):
            plgpu.copy_gmem_to_smem(source, buffer.at[slot], self.landed.at[slot])

    def take(self, count) -> tuple[Any, ...]:
        """Wait for the count-th blocks and return them."""
        slot = jax.lax.rem(count, self.stages)
        plgpu.barrier_wait(self.landed.at[slot])
        return tuple(buffer.at[slot] for buffer in self.buffers)

    def release(self, count) -> None:
        """Free the count-th blocks, which this worker no longer needs."""
        plgpu.barrier_arrive(self.consumed.at[jax.lax.rem(count, self.stages)])


def zeros(rows: int, columns: int):
    """Return a wgmma accumulator of zeros."""
    return plgpu.layout_cast(jnp.zeros((rows, columns), jnp.float32), plgpu.Layout.WGMMA)


def load(ref, layout):
    """Load a vector from shared memory."""
    return plgpu.layout_cast(ref[...], layout)
