"""The gated delta rule as Pallas-Triton kernels, for GPUs from sm_80 on: chunks side by side where nothing is carried.

Five kernels (chunks as in flash-linear-attention, Yang et al. 2024, arXiv:2412.06464):

    within     of every chunk: the inverse of its triangular system, and its attention
    forward    one chunk after another: the state before each, and the outputs
    backward   one chunk before another: the gradients of the state after each, and of what is written
    pairs      of every chunk: what was written, the gradients of q k^T, k k^T and beta
    heads      of every chunk: the gradients of q and k

`within` runs again in the backward pass, which keeps nothing but the inputs and the state before each chunk.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Bool, Float

from pallas_kernels import cost
from pallas_kernels.gated_delta_rule import kernels
from pallas_kernels.gated_delta_rule.chunks import CHUNK, summed, whole_chunks
from pallas_kernels.gpus import Device, current_device

# The name of the outputs and states in policies of jax.checkpoint: one that saves them spares a second run.
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
    """Outputs in the dtype of v, and the last state in float32."""
    length = v.shape[1]
    q, k, v, log_decay, beta, starts = (whole_chunks(x, 1) for x in (q, k, v, log_decay, beta, starts))
    log_decay, beta = (x.astype(jnp.float32).swapaxes(1, 2) for x in (log_decay, beta))
    by_chunk = log_decay.reshape(len(v), v.shape[2], -1, CHUNK), starts.reshape(len(v), 1, -1, CHUNK)
    total, begun = summed(*by_chunk)
    total, begun = total.reshape(beta.shape), begun.reshape(starts.shape)
    out, state = _rule(q, k, v, total, begun, beta, state, scale, interpret)
    return out[:, :length], state


def refuses(device: Device, request: tuple[Any, Any]) -> str | None:
    """Why these kernels cannot run for q and v of such shapes and dtypes on a device, or None."""
    if device.capability is None or device.capability < (8, 0):
        return "it needs an NVIDIA GPU of compute capability 8.0 or later"
    q, v = request
    if not {q.shape[-1], v.shape[-1]} <= {64, 128}:
        return f"heads must have 64 or 128 elements, and these have {q.shape[-1]} and {v.shape[-1]}"
    if v.dtype.itemsize != 2:
        return f"it multiplies 16-bit numbers, not {v.dtype}"
    # Offsets within an array are 32-bit integers in the kernels, with a sign. The largest one holds the states.
    states = v.size // CHUNK * q.shape[-1]
    if max(states, v.size) >= 2**31:
        return f"it has arrays of {max(states, v.size)} elements; fewer than 2^31 are supported"
    return None


def _undifferentiated(q, k, v, total, begun, beta, state, scale, interpret):
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
    given = (states, d_missing, total, begun, beta)
    written, d_qk, d_kk, of_pairs, d_beta = call.pairs(k, v, d_out, inverse, attention, *given)
    given = (states, d_states, d_missing, d_qk, d_kk, total, begun, beta)
    dq, dk, of_heads = call.heads(q, k, d_out, written, *given)
    dv = (d_missing * beta.swapaxes(1, 2)[..., None]).astype(v.dtype)
    return call.of_key_heads(dq), call.of_key_heads(dk), dv, of_pairs + of_heads, None, d_beta, d_state


_rule = jax.custom_vjp(_undifferentiated, nondiff_argnums=(7, 8))
_rule.defvjp(_rule_forward, _rule_backward)


class _Call:
    """Sizes of one call, and its five kernels. A program is of a chunk or of some columns of a state, of a head."""

    def __init__(self, q: Array, v: Array, scale: float, interpret: bool):
        batch, length, key_heads, dk = q.shape
        heads, dv = v.shape[2:]
        self.scale, self.interpret, self.dtype = scale, interpret, v.dtype
        self.varying = jax.typeof(q).manual_axis_type
        self.grid, self.group = (heads, batch), heads // key_heads
        self.dk, self.dv, self.chunks = dk, dv, length // CHUNK
        # What is carried over chunks waits for no memory; but on compute capability 12.0 loads ahead of it spill.
        self.stages = 1 if (current_device().capability or (0, 0)) >= (12, 0) else 2
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
        """The inverse of a token's triangular system, and its attention, for each token of its chunk."""
        given = ((q, "key head"), (k, "key head"), (total, "row of head"), (begun, "row"), (beta, "row of head"))
        flops = 2 * CHUNK**2 * (2 * self.dk + 6 * CHUNK)
        made = (("pairs", self.dtype), ("pairs", self.dtype))
        return self._run(kernels.within, self.chunks, flops, given, made)

    def forward(self, q, k, v, inverse, attention, total, begun, beta, state) -> tuple[Array, Array, Array]:
        """Outputs, the last state, and the state before each chunk."""
        given = (
            *((q, "key head"), (k, "key head"), (v, "values"), (inverse, "pairs"), (attention, "pairs")),
            *((total, "row of head"), (begun, "row"), (beta, "row of head"), (state, "state")),
        )
        flops = 2 * CHUNK * self.chunks * COLUMNS * (3 * self.dk + 2 * CHUNK)
        made = (("values", self.dtype), ("state", jnp.float32), ("states", self.dtype))
        return self._run(kernels.forward, self.dv // COLUMNS, flops, given, made)

    def backward(self, q, k, d_out, inverse, attention, total, begun, beta, d_last) -> tuple[Array, Array, Array]:
        """Gradients of the state after each chunk, of beta times what a state lacks of v, and of the first state."""
        given = (
            *((q, "key head"), (k, "key head"), (d_out, "values"), (inverse, "pairs"), (attention, "pairs")),
            *((total, "row of head"), (begun, "row"), (beta, "row of head"), (d_last, "state")),
        )
        flops = 2 * CHUNK * self.chunks * COLUMNS * (3 * self.dk + 2 * CHUNK)
        made = (("states", self.dtype), ("values", self.dtype), ("state", jnp.float32))
        return self._run(kernels.backward, self.dv // COLUMNS, flops, given, made)

    def pairs(self, k, v, d_out, inverse, attention, states, d_missing, total, begun, beta) -> Any:
        """What was written, and gradients of q k^T and k k^T, of the summed decays (not all of it) and of beta."""
        given = (
            *((k, "key head"), (v, "values"), (d_out, "values"), (inverse, "pairs"), (attention, "pairs")),
            *((states, "states"), (d_missing, "values")),
            *((total, "row of head"), (begun, "row"), (beta, "row of head")),
        )
        flops = 2 * CHUNK * (self.dv * (self.dk + 3 * CHUNK) + CHUNK * self.dk)
        made = (("values", self.dtype), *(("pairs", self.dtype),) * 2, *(("row of head", jnp.float32),) * 2)
        return self._run(kernels.pairs, self.chunks, flops, given, made)

    def heads(self, q, k, d_out, written, states, d_states, d_missing, d_qk, d_kk, total, begun, beta) -> Any:
        """Gradients of q and k, for each value head, and the rest of that of the summed decays."""
        given = (
            *((q, "key head"), (k, "key head"), (d_out, "values"), (written, "values")),
            *((states, "states"), (d_states, "states"), (d_missing, "values"), (d_qk, "pairs"), (d_kk, "pairs")),
            *((total, "row of head"), (begun, "row"), (beta, "row of head")),
        )
        flops = 2 * CHUNK * 3 * self.dk * (self.dv + CHUNK)
        made = (*(("keys", self.dtype),) * 2, ("row of head", jnp.float32))
        return self._run(kernels.heads, self.chunks, flops, given, made)

    def of_key_heads(self, gradient: Array) -> Array:
        """The sum over the value heads that share a key head."""
        *shape, dk = self.shapes["key head"]
        return jnp.sum(gradient.reshape(*shape, self.group, dk), axis=-2, dtype=jnp.float32).astype(self.dtype)

    def _run(self, kernel: Callable, programs: int, flops: int, given: tuple, made: tuple) -> Any:
        stages = self.stages if kernel in (kernels.forward, kernels.backward) else 1
        call = pl.pallas_call(
            partial(kernel, scale=self.scale, columns=COLUMNS),
            grid=(programs, *self.grid),
            in_specs=[self._part(layout) for _, layout in given],
            out_specs=[self._part(layout) for layout, _ in made],
            out_shape=[
                jax.ShapeDtypeStruct(self.shapes[layout], dtype, manual_axis_type=self.varying)
                for layout, dtype in made
            ],
            compiler_params=plgpu.CompilerParams(num_warps=WARPS, num_stages=stages),
            interpret=self.interpret,
            name=f"gated_delta_{kernel.__name__}",
        )
        with cost.flops(flops * math.prod((programs, *self.grid))):
            return call(*(x for x, _ in given))

    def _part(self, layout: str) -> pl.BlockSpec:
        """What a program gets of an array: all of its head."""
        head_axis = {"key head": 2, "keys": 2, "values": 2, "row": None}.get(layout, 1)
        shared = self.group if layout == "key head" else 1
        shape = self.shapes[layout]

        def place(_, head, batch):
            return tuple({0: batch, head_axis: head // shared}.get(axis, 0) for axis in range(len(shape)))

        return pl.BlockSpec(tuple(None if axis in (0, head_axis) else n for axis, n in enumerate(shape)), place)
