"""Compile cases of Mamba-2: the layers of Nemotron 3 Nano and of Granite 4 Tiny, and a small one."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.case import Case, bind_request
from pallas_kernels.mamba2_scan import triton

LENGTH, SIZE, STATE = 4096, 64, 128


def _cases() -> Iterator[Case]:
    for inputs, dtype, heads, groups in (
        ("Nemotron 3 Nano", "bfloat16", 64, 8),
        ("Granite 4 Tiny", "bfloat16", 48, 1),
        ("three heads a group", "float16", 12, 4),
    ):
        x = jax.ShapeDtypeStruct((1, LENGTH, heads, SIZE), jnp.dtype(dtype))
        write = jax.ShapeDtypeStruct((1, LENGTH, groups, STATE), jnp.dtype(dtype))
        step = jax.ShapeDtypeStruct(x.shape[:3], jnp.float32)
        of_head = jax.ShapeDtypeStruct((heads,), jnp.float32)
        starts = jax.ShapeDtypeStruct(x.shape[:2], jnp.bool_)
        last = jax.ShapeDtypeStruct((1, heads, SIZE, STATE), jnp.float32)
        arguments = (x, step, of_head, write, write, of_head, starts, last)
        refuses = bind_request(triton.refuses, (x, write))
        backward = partial(_gradients, triton.mamba2_scan)
        yield Case("mamba2_scan", "triton", "forward", inputs, triton.mamba2_scan, arguments, refuses)
        yield Case("mamba2_scan", "triton", "backward", inputs, backward, (*arguments, x, last), refuses)


def _gradients(op: Any, *arguments: Any):
    """Compute gradients of all arguments except `starts`; this compiles the kernels of the forward pass too."""
    *arrays, starts, state, d_out, d_last = arguments
    _, pull = jax.vjp(lambda *arrays: op(*arrays[:6], starts, arrays[6]), *arrays, state)
    return pull((d_out, d_last))


CASES = tuple(_cases())
