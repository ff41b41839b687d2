"""Compile cases of the gated delta rule: the linear attention of Qwen3-Next, and heads half as wide."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.case import Case, bind_request
from pallas_kernels.gated_delta_rule import triton

LENGTH, KEY_HEADS, HEADS = 4096, 16, 32


def _cases() -> Iterator[Case]:
    for inputs, dtype, size in (("Qwen3-Next", "bfloat16", 128), ("heads of 64", "float16", 64)):
        q = jax.ShapeDtypeStruct((1, LENGTH, KEY_HEADS, size), jnp.dtype(dtype))
        v = jax.ShapeDtypeStruct((1, LENGTH, HEADS, size), jnp.dtype(dtype))
        by_head = jax.ShapeDtypeStruct(v.shape[:3], jnp.float32)
        starts = jax.ShapeDtypeStruct(v.shape[:2], jnp.bool_)
        state = jax.ShapeDtypeStruct((1, HEADS, size, size), jnp.float32)
        arguments = (q, q, v, by_head, by_head, starts, state)
        refuses = bind_request(triton.refuses, (q, v))
        forward = partial(triton.gated_delta_rule, scale=size**-0.5)
        backward = partial(_gradients, forward)
        yield Case("gated_delta_rule", "triton", "forward", inputs, forward, arguments, refuses)
        yield Case("gated_delta_rule", "triton", "backward", inputs, backward, (*arguments, v, state), refuses)


def _gradients(op: Any, q: Any, k: Any, v: Any, log_decay: Any, beta: Any, starts: Any, state: Any, *cotangents: Any):
    """Compute gradients of all arguments except `starts`; this compiles the kernels of the forward pass too."""
    _, pull = jax.vjp(lambda *arrays: op(*arrays[:5], starts, arrays[5]), q, k, v, log_decay, beta, state)
    return pull(cotangents)


CASES = tuple(_cases())
