"""The gated delta rule as Pallas-Triton kernels, for GPUs from sm_80 on.

There are five kernels (chunks as in flash-linear-attention, Yang et al. 2024, arXiv:2412.06464):

    within     all chunks in parallel: the inverse of the chunk's triangular system, and its attention
    forward    chunks in order: the state before each chunk, and the outputs
    backward   chunks in reverse order: the gradients of the state after each chunk, and of the written values
    pairs      all chunks in parallel: the written values, and the gradients of q k^T, k k^T and beta
    heads      all chunks in parallel: the gradients of q and k

The residuals of the backward pass are only the inputs and the state before each chunk, so it runs `within` again.
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
from pallas_kernels.gated_delta_rule import kernels
from pallas_kernels.gpus import Device, current_device
from pallas_kernels.triton_call import triton_call

# The name of the outputs and states in policies of jax.checkpoint: a policy that saves them avoids a second run.
RESIDUALS = "gated_delta_rule"
COLUMNS, WARPS = 32, 8  # columns of a state that a program carries or reads at a time


def gated_delta_rule(
    q: Float[Array, "b s hk dk"],
    k: Float[Array, "b s hk dk"],
    v: Float[Array, "b s hv dv"],
    log_decay: Float[Array, "b s hv"],
    beta: Float[Array, "b s hv"],
    starts: Bool[Array, "b s"],
    state: Float[Array, "b hv dk dv"],
    scale: float,
    *,
    interpret: bool = False,
) -> tuple[Float[Array, "b s hv dv"], Float[Array, "b hv dk dv"]]:
    """Return outputs in the dtype of v, and the last state in float32."""
    length = v.shape[1]
    q, k, v, log_decay, beta, starts = (whole_chunks(x, 1) for x in (q, k, v, log_decay, beta, starts))
    # The numbers of a head become consecutive in memory; a program reads a chunk's 64 numbers.
    log_decay, beta = (x.astype(jnp.float32).swapaxes(1, 2) for x in (log_decay, beta))
    by_chunk = log_decay.reshape(len(v), v.shape[2], -1, CHUNK), starts.reshape(len(v), 1, -1, CHUNK)
    # Outside the custom derivative: the kernels return the gradient of the sums, and jax differentiates the sums.
    total, begun = sum_decays(*by_chunk)
    total, begun = total.reshape(beta.shape), begun.reshape(starts.shape)
    out, state = _rule(q, k, v, total, begun, beta, state, scale, interpret)
    return out[:, :length], state


def refuses(device: Device, request: tuple[Any, Any]) -> str | None:
    """Return why these kernels cannot run on a device for q and v of these shapes and dtypes, or None."""
    if device.capability is None or device.capability < (8, 0):
        return "it needs an NVIDIA GPU of compute capability 8.0 or later"
    q, v = request
    if not {q.shape[-1], v.shape[-1]} <= {64, 128}:
        return f"heads must have 64 or 128 elements, and these have {q.shape[-1]} and {v.shape[-1]}"
    if v.dtype.itemsize != 2:
        return f"it multiplies 16-bit numbers, not {v.dtype}"
    # In the kernels, offsets within an array are signed 32-bit integers. The largest array is v or the states.
    states = v.size // CHUNK * q.shape[-1]
    if max(states, v.size) >= 2**31:
        return f"it has arrays of {max(states, v.size)} elements; fewer than 2^31 are supported"
    return None


def _rule_primal(q, k, v, total, begun, beta, state, scale, interpret):
    out, last, _ = _forward(q, k, v, total, begun, beta, state, scale, interpret)
    return out, last


def _rule_forward(q, k, v, total, begun, beta, state, scale, interpret):
    out, last, states = checkpoint_name(_forward(q, k, v, total, begun, beta, state, scale, interpret), RESIDUALS)
    return (out, last), (q, k, v, total, begun, beta, states)


def _forward(q, k, v, total, begun, beta, state, scale, interpret):
    call = _Call(q, v, scale, interpret)
    inverse, attention = call.within(q, k, total, begun, beta)
    return call.forward(q, k, v, inverse, attention, total, begun, beta, state)


def _rule_backward(scale, interpret, residuals, cotangents):
    q, k, v, total, begun, beta, states = residuals
    d_out, d_last = cotangents
    call = _Call(q, v, scale, interpret)
    inverse, attention = call.within(q, k, total, begun, beta)
    d_states, d_missing, d_state = call.backward(q, k, d_out, inverse, attention, total, begun, beta, d_last)
    inputs = (states, d_missing, total, begun, beta)
    written, d_qk, d_kk, d_total_pairs, d_beta = call.pairs(k, v, d_out, inverse, attention, *inputs)
    inputs = (states, d_states, d_missing, d_qk, d_kk, total, begun, beta)
    dq, dk, d_total_heads = call.heads(q, k, d_out, written, *inputs)
    # v is used only in beta * missing, with missing = v - held.
    dv = (d_missing * beta.swapaxes(1, 2)[..., None]).astype(v.dtype)
    return call.of_key_heads(dq), call.of_key_heads(dk), dv, d_total_pairs + d_total_heads, None, d_beta, d_state


_rule = jax.custom_vjp(_rule_primal, nondiff_argnums=(7, 8))
_rule.defvjp(_rule_forward, _rule_backward)


class _Call:
    """Sizes of one call, and its five kernels. A program computes a chunk, or some columns of a state, of one head."""

    def __init__(self, q: Array, v: Array, scale: float, interpret: bool):
        batch, length, key_heads, dk = q.shape
        heads, dv = v.shape[2:]
        self.scale, self.interpret, self.dtype = scale, interpret, v.dtype
        self.varying = jax.typeof(q).manual_axis_type
        self.grid, self.group = (heads, batch), heads // key_heads
        self.dk, self.dv, self.chunks = dk, dv, length // CHUNK
        # Two stages prefetch the next chunk in the sequential kernels; on compute capability 12.0 this would spill.
        self.stages = 1 if (current_device().capability or (0, 0)) >= (12, 0) else 2
        # Array shapes by the layout names that the methods below use.
        self.shapes = {
            "key head": (batch, length, key_heads, dk),
            "keys": (batch, length, heads, dk),
            "values": (batch, length, heads, dv),
            "row": (batch, length),
            "row of head": (batch, heads, length),
            "pairs": (batch, heads, length, CHUNK),
            "state": (batch, heads, dk, dv),
            "states": (batch, heads, self.chunks, dk, dv),
        }

    def within(self, q, k, total, begun, beta) -> tuple[Array, Array]:
        """Return the inverse of each chunk's triangular system, and its attention: a row of tokens for each token."""
        inputs = ((q, "key head"), (k, "key head"), (total, "row of head"), (begun, "row"), (beta, "row of head"))
        # q k^T, k k^T, and two products in `_inverse` that each are three bfloat16 products.
        flops = 2 * CHUNK**2 * (2 * self.dk + 6 * CHUNK)
        outputs = (("pairs", self.dtype), ("pairs", self.dtype))
        return self._run(kernels.within, self.chunks, flops, inputs, outputs)

    def forward(self, q, k, v, inverse, attention, total, begun, beta, state) -> tuple[Array, Array, Array]:
        """Return the outputs, the last state, and the state before each chunk."""
        inputs = (
            *((q, "key head"), (k, "key head"), (v, "values"), (inverse, "pairs"), (attention, "pairs")),
            *((total, "row of head"), (begun, "row"), (beta, "row of head"), (state, "state")),
        )
        flops = 2 * CHUNK * self.chunks * COLUMNS * (3 * self.dk + 2 * CHUNK)
        outputs = (("values", self.dtype), ("state", jnp.float32), ("states", self.dtype))
        return self._run(kernels.forward, self.dv // COLUMNS, flops, inputs, outputs)

    def backward(self, q, k, d_out, inverse, attention, total, begun, beta, d_last) -> tuple[Array, Array, Array]:
        """Return gradients of the state after each chunk, of beta * missing (kernels.py), and of the first state."""
        inputs = (
            *((q, "key head"), (k, "key head"), (d_out, "values"), (inverse, "pairs"), (attention, "pairs")),
            *((total, "row of head"), (begun, "row"), (beta, "row of head"), (d_last, "state")),
        )
        flops = 2 * CHUNK * self.chunks * COLUMNS * (3 * self.dk + 2 * CHUNK)
        outputs = (("states", self.dtype), ("values", self.dtype), ("state", jnp.float32))
        return self._run(kernels.backward, self.dv // COLUMNS, flops, inputs, outputs)

    def pairs(self, k, v, d_out, inverse, attention, states, d_missing, total, begun, beta) -> Any:
        """Return the written values, and gradients of q k^T and k k^T, of the summed decays (a part) and of beta."""
        inputs = (
            *((k, "key head"), (v, "values"), (d_out, "values"), (inverse, "pairs"), (attention, "pairs")),
            *((states, "states"), (d_missing, "values")),
            *((total, "row of head"), (begun, "row"), (beta, "row of head")),
        )
        flops = 2 * CHUNK * (self.dv * (self.dk + 3 * CHUNK) + CHUNK * self.dk)
        outputs = (("values", self.dtype), *(("pairs", self.dtype),) * 2, *(("row of head", jnp.float32),) * 2)
        return self._run(kernels.pairs, self.chunks, flops, inputs, outputs)

    def heads(self, q, k, d_out, written, states, d_states, d_missing, d_qk, d_kk, total, begun, beta) -> Any:
        """Return gradients of q and k for each value head, and the other part of the summed decays' gradient."""
        inputs = (
            *((q, "key head"), (k, "key head"), (d_out, "values"), (written, "values")),
            *((states, "states"), (d_states, "states"), (d_missing, "values"), (d_qk, "pairs"), (d_kk, "pairs")),
            *((total, "row of head"), (begun, "row"), (beta, "row of head")),
        )
        flops = 2 * CHUNK * 3 * self.dk * (self.dv + CHUNK)
        outputs = (*(("keys", self.dtype),) * 2, ("row of head", jnp.float32))
        return self._run(kernels.heads, self.chunks, flops, inputs, outputs)

    def of_key_heads(self, gradient: Array) -> Array:
        """Sum a gradient over the value heads that share a key head."""
        # Each value head has its own array: heads that add to a shared one would need atomics, which add in any order.
        *shape, dk = self.shapes["key head"]
        return jnp.sum(gradient.reshape(*shape, self.group, dk), axis=-2, dtype=jnp.float32).astype(self.dtype)

    def _run(self, kernel: Callable, programs: int, flops: int, inputs: tuple, outputs: tuple) -> Any:
        stages = self.stages if kernel in (kernels.forward, kernels.backward) else 1
        call = triton_call(
            partial(kernel, scale=self.scale, columns=COLUMNS),
            grid=(programs, *self.grid),
            in_specs=[self._part(layout) for _, layout in inputs],
            out_specs=[self._part(layout) for layout, _ in outputs],
            out_shape=[
                jax.ShapeDtypeStruct(self.shapes[layout], dtype, manual_axis_type=self.varying)
                for layout, dtype in outputs
            ],
            num_warps=WARPS,
            num_stages=stages,
            interpret=self.interpret,
            name=f"gated_delta_{kernel.__name__}",
        )
        # XLA cannot look into a kernel; the plan reads the count from the name stack.
        with cost.flops(flops * math.prod((programs, *self.grid))):
            return call(*(x for x, _ in inputs))

    def _part(self, layout: str) -> pl.BlockSpec:
        """Return the part of an array that a program sees: all elements of its head."""
        # Layouts without an entry have their heads in axis 1; "row" (None) is the same for all heads.
        head_axis = {"key head": 2, "keys": 2, "values": 2, "row": None}.get(layout, 1)
        # The grid counts value heads; consecutive groups of value heads read the same key head.
        shared = self.group if layout == "key head" else 1
        shape = self.shapes[layout]

        def place(_, head, batch):
            return tuple({0: batch, head_axis: head // shared}.get(axis, 0) for axis in range(len(shape)))

        return pl.BlockSpec(tuple(None if axis in (0, head_axis) else n for axis, n in enumerate(shape)), place)
