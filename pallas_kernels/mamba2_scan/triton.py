"""Mamba-2 as Pallas-Triton kernels, for GPUs from sm_80 on.

There are four kernels (chunks as in Dao & Gu 2024, arXiv:2405.21060, section 6); `carry` runs in both directions:

    carry      chunks in order: the state before each chunk; in reverse order: the gradient of the state after it
    outputs    all chunks in parallel: the outputs
    readers    all chunks in parallel: the gradients of `read`, and parts of the decays' gradients
    writers    all chunks in parallel: the other gradients

The residuals of the backward pass are the inputs and the state before each chunk.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float

from pallas_kernels import cost
from pallas_kernels.chunks import CHUNK, sum_decays, whole_chunks
from pallas_kernels.gpus import Device, current_device
from pallas_kernels.mamba2_scan import kernels
from pallas_kernels.triton_call import triton_call

# The name of the outputs and states in policies of jax.checkpoint: a policy that saves them avoids a second run.
RESIDUALS = "mamba2_scan"
COLUMNS = 64  # columns of a state that a program of `carry` carries
WARPS = 8
HEADS = 8  # most heads of a group that share a program, and the products of `read` and `write`


def mamba2_scan(
    x: Float[Array, "b s h p"],
    step: Float[Array, "b s h"],
    rate: Float[Array, " h"],
    write: Float[Array, "b s g n"],
    read: Float[Array, "b s g n"],
    skip: Float[Array, " h"],
    starts: Bool[Array, "b s"],
    state: Float[Array, "b h p n"],
    *,
    tokens: int | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "b s h p"], Float[Array, "b h p n"]]:
    """Return outputs in the dtype of x, and the last state in float32. tokens: of a program; None: as fits the GPU."""
    if tokens is None:
        tokens = 64 if (current_device().capability or (0, 0))[0] in (9, 10) else 32
    length = x.shape[1]
    x, step, write, read, starts = (whole_chunks(array, 1) for array in (x, step, write, read, starts))
    # The numbers of a head become consecutive in memory; a program reads a chunk's 64 numbers.
    step = step.astype(jnp.float32).swapaxes(1, 2)
    # Outside the custom derivative: the kernels return the gradient of the sums, and jax differentiates the sums.
    log_decay = (rate[:, None] * step).reshape(*step.shape[:2], -1, CHUNK)
    total, begun = sum_decays(log_decay, starts.reshape(len(x), 1, -1, CHUNK))
    total, begun = total.reshape(step.shape), begun.reshape(starts.shape)
    skip = jnp.broadcast_to(skip, (len(x), x.shape[2]))
    out, state = _scan(x, write, read, total, begun, step, skip, state, tokens, interpret)
    return out[:, :length], state


def refuses(device: Device, request: tuple[Any, Any]) -> str | None:
    """Return why these kernels cannot run on a device for x and `write` of these shapes and dtypes, or None."""
    if device.capability is None or device.capability < (8, 0):
        return "it needs an NVIDIA GPU of compute capability 8.0 or later"
    x, write = request
    if (x.shape[-1], write.shape[-1]) != (64, 128):
        return f"heads must have 64 features and states 128, and these have {x.shape[-1]} and {write.shape[-1]}"
    if x.dtype.itemsize != 2:
        return f"it multiplies 16-bit numbers, not {x.dtype}"
    # In the kernels, offsets within an array are signed 32-bit integers. The largest array is x or the states.
    states = x.size // CHUNK * write.shape[-1]
    if max(states, x.size) >= 2**31:
        return f"it has arrays of {max(states, x.size)} elements; fewer than 2^31 are supported"
    return None


def _scan_primal(x, write, read, total, begun, step, skip, state, tokens, interpret):
    out, last, _ = _forward(x, write, read, total, begun, step, skip, state, tokens, interpret)
    return out, last


def _scan_forward(x, write, read, total, begun, step, skip, state, tokens, interpret):
    ran = _forward(x, write, read, total, begun, step, skip, state, tokens, interpret)
    out, last, states = checkpoint_name(ran, RESIDUALS)
    return (out, last), (x, write, read, total, begun, step, skip, states)


def _forward(x, write, read, total, begun, step, skip, state, tokens, interpret):
    call = _Call(x, write, tokens, interpret)
    states, last = call.carry("states", x, write, total, begun, step, state)
    return call.outputs(x, write, read, states, total, begun, step, skip), last, states


def _scan_backward(tokens, interpret, residuals, cotangents):
    x, write, read, total, begun, step, skip, states = residuals
    d_out, d_last = cotangents
    call = _Call(x, write, tokens, interpret)
    d_states, d_state = call.carry("d_states", d_out, read, total, begun, step, d_last)
    d_read, d_between, d_carried = call.readers(x, write, read, d_out, states, total, begun, step)
    arrays = (x, write, read, d_out, states, d_states, total, begun, step, skip)
    dx, d_write, d_step, d_to_end, d_skip, d_through = call.writers(*arrays)
    d_step += d_to_end
    # What a token writes is a multiple of its step and, by its decay until it is read, of exp(-total).
    d_total = d_between + d_carried - step * d_step

    def by_chunk(gradient: Array) -> Array:
        return gradient.reshape(*skip.shape, call.chunks, -1)

    # Decays to the end of a chunk depend on its last summed decay, so its gradient collects all of theirs.
    d_last = by_chunk(step * d_to_end).sum(axis=-1) + by_chunk(d_through).sum(axis=-1)
    d_total = by_chunk(d_total).at[..., -1].add(d_last).reshape(total.shape)
    d_write, d_read = (call.of_groups(gradient) for gradient in (d_write, d_read))
    return dx, d_write, d_read, d_total, None, d_step, jnp.sum(d_skip, axis=2), d_state


_scan = jax.custom_vjp(_scan_primal, nondiff_argnums=(8, 9))
_scan.defvjp(_scan_forward, _scan_backward)


class _Call:
    """Sizes of one call, and its kernels. A program computes a chunk of some heads, or some columns of a state."""

    def __init__(self, x: Array, write: Array, tokens: int, interpret: bool):
        batch, length, heads, size = x.shape
        groups, state = write.shape[2:]
        self.interpret, self.dtype, self.varying = interpret, x.dtype, jax.typeof(x).manual_axis_type
        self.batch, self.heads, self.group, self.chunks = batch, heads, heads // groups, length // CHUNK
        self.size, self.state, self.tokens = size, state, tokens
        # A program has heads of one group.
        self.shared = max(n for n in range(1, HEADS + 1) if self.group % n == 0)
        # Array shapes by the layout names that the methods below use.
        self.shapes = {
            "tokens": (batch, length, heads, size),
            "group": (batch, length, groups, state),
            "program": (batch, length, heads // self.shared, state),
            "row": (batch, length),
            "row of head": (batch, heads, length),
            "head": (batch, heads),
            "block of head": (batch, heads, length // tokens),
            "state": (batch, heads, size, state),
            "states": (batch, heads, self.chunks, size, state),
        }

    def carry(self, name, values, keys, total, begun, step, state) -> tuple[Array, Array]:
        """Return the state before each chunk and the last; 'd_states': their gradients, in reverse order."""
        inputs = (
            *((values, "tokens"), (keys, "group"), (total, "row of head"), (begun, "row"), (step, "row of head")),
            (state, "state"),
        )
        kernel = partial(kernels.carry, columns=COLUMNS, backward=name == "d_states")
        flops = 2 * CHUNK * self.chunks * self.size * COLUMNS
        outputs = (("states", self.dtype), ("state", jnp.float32))
        return self._run(name, kernel, self.state // COLUMNS, None, flops, inputs, outputs)

    def outputs(self, x, write, read, states, total, begun, step, skip) -> Array:
        """Return the outputs."""
        inputs = (
            *((x, "tokens"), (write, "group"), (read, "group"), (states, "states")),
            *((total, "row of head"), (begun, "row"), (step, "row of head"), (skip, "head")),
        )
        flops = self._flops(pairs=1, pairs_of_head=1, states=1)
        return self._run_blocks(kernels.outputs, flops, inputs, (("tokens", self.dtype),))[0]

    def readers(self, x, write, read, d_out, states, total, begun, step) -> Any:
        """Return the gradients of `read`, by program, and two parts of the summed decays' gradients."""
        inputs = (
            *((x, "tokens"), (write, "group"), (read, "group"), (d_out, "tokens"), (states, "states")),
            *((total, "row of head"), (begun, "row"), (step, "row of head")),
        )
        outputs = ("program", self.dtype), ("row of head", jnp.float32), ("row of head", jnp.float32)
        return self._run_blocks(kernels.readers, self._flops(pairs=2, pairs_of_head=1, states=1), inputs, outputs)

    def writers(self, x, write, read, d_out, states, d_states, total, begun, step, skip) -> Any:
        """Return gradients of x, of `write` (by program), and parts for the steps, the skips and the decays."""
        inputs = (
            *((x, "tokens"), (write, "group"), (read, "group"), (d_out, "tokens")),
            *((states, "states"), (d_states, "states")),
            *((total, "row of head"), (begun, "row"), (step, "row of head"), (skip, "head")),
        )
        outputs = (
            *(("tokens", self.dtype), ("program", self.dtype)),
            *(("row of head", jnp.float32), ("row of head", jnp.float32)),
            *(("block of head", jnp.float32), ("block of head", jnp.float32)),
        )
        return self._run_blocks(kernels.writers, self._flops(pairs=3, pairs_of_head=2, states=2), inputs, outputs)

    def _run_blocks(self, kernel: Callable, flops: int, inputs: tuple, outputs: tuple) -> Any:
        part = partial(kernel, heads=self.shared, tokens=self.tokens)
        blocks = self.chunks * CHUNK // self.tokens
        return self._run(kernel.__name__, part, blocks, self.shared, flops, inputs, outputs)

    def _flops(self, pairs: int, pairs_of_head: int, states: int) -> int:
        """Count operations of a program: products over pairs of tokens, of the group and of a head, and with states."""
        of_head = self.size * (pairs_of_head * CHUNK + states * self.state)
        return 2 * self.tokens * (pairs * CHUNK * self.state + self.shared * of_head)

    def of_groups(self, gradient: Array) -> Array:
        """Sum a gradient over the programs that share a group."""
        # Each program has its own array: programs that add to a shared one would need atomics, which add in any order.
        *shape, state = self.shapes["group"]
        return jnp.sum(gradient.reshape(*shape, -1, state), axis=-2, dtype=jnp.float32).astype(self.dtype)

    def _run(
        self, name: str, kernel: Callable, programs: int, heads: int | None, flops: int, inputs: tuple, outputs: tuple
    ) -> Any:
        # Two stages prefetch the next chunk; four warps would each compute more of 64 tokens than registers hold.
        carries = heads is None
        warps, stages = 4 if carries or self.tokens < CHUNK else WARPS, 2 if carries else 1
        grid = (programs, self.heads // (heads or 1), self.batch)
        call = triton_call(
            kernel,
            grid=grid,
            in_specs=[self._part(layout, heads) for _, layout in inputs],
            out_specs=[self._part(layout, heads) for layout, _ in outputs],
            out_shape=[
                jax.ShapeDtypeStruct(self.shapes[layout], dtype, manual_axis_type=self.varying)
                for layout, dtype in outputs
            ],
            num_warps=warps,
            num_stages=stages,
            interpret=self.interpret,
            name=f"mamba2_{name}",
        )
        # XLA cannot look into a kernel; the plan reads the count from the name stack.
        with cost.flops(flops * math.prod(grid)):
            return call(*(x for x, _ in inputs))

    def _part(self, layout: str, heads: int | None) -> pl.BlockSpec:
        """Return the part of an array that a program of some heads sees; None: of one head, without its axis."""
        shape = self.shapes[layout]
        # Layouts without an entry have their heads in axis 1; "row" (None) is the same for all heads.
        axis = {"tokens": 2, "group": 2, "program": 2, "row": None}.get(layout, 1)
        # One group, and one array of each program: both axes disappear.
        size = None if layout in ("group", "program") else heads

        def place(_, program, batch):
            index = program * (heads or 1) // self.group if layout == "group" else program
            return tuple({0: batch, axis: index}.get(i, 0) for i in range(len(shape)))

        return pl.BlockSpec(tuple({0: None, axis: size}.get(i, n) for i, n in enumerate(shape)), place)
