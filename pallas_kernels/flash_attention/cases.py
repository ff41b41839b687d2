"""Compile cases of flash attention: packed rows and grouped queries, by dtype and head dimension."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.case import Case, bind_request
from pallas_kernels.flash_attention import triton, triton_wide
from pallas_kernels.flash_attention.mosaic import mosaic_backward, mosaic_forward
from pallas_kernels.flash_attention.variant import AttentionRequest, Variant
from pallas_kernels.gpus import Device
from pallas_kernels.registry import on_hopper

ROWS, LENGTH, HEADS, KV_HEADS = 2, 2048, 8, 2
# (dtype, head dimension, soft-cap of the logits), the most common shape first; cases with a soft-cap also have sinks.
SHAPES = (
    *((dtype, head_dim, None) for dtype in ("bfloat16", "float32") for head_dim in (128, 64, 80, 96, 192, 256)),
    ("float16", 128, None),
    ("bfloat16", 128, 30.0),
)
WIDE_SHAPES = (("bfloat16", 512, None), ("float16", 320, 30.0))


def _cases(
    backend: str,
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    refuses: Callable[[Device, AttentionRequest], str | None],
    shapes: Iterable[tuple[str, int, float | None]] = SHAPES,
) -> Iterator[Case]:
    for dtype, head_dim, soft_cap in shapes:
        variant = Variant(head_dim**-0.5, soft_cap, True, None, 0)
        request = AttentionRequest(
            jnp.dtype(dtype), head_dim, LENGTH, LENGTH, True, variant, soft_cap is not None, True
        )
        q = jax.ShapeDtypeStruct((ROWS, LENGTH, HEADS, head_dim), dtype)
        k = jax.ShapeDtypeStruct((ROWS, LENGTH, KV_HEADS, head_dim), dtype)
        bound = jax.ShapeDtypeStruct((ROWS, LENGTH), jnp.int32)
        per_query = jax.ShapeDtypeStruct((ROWS, HEADS, LENGTH), jnp.float32)
        sinks = None if soft_cap is None else jax.ShapeDtypeStruct((HEADS,), jnp.float32)
        inputs = f"{dtype} d={head_dim}" + ("" if soft_cap is None else " soft-cap, sinks")
        for direction, function, arguments in (
            ("forward", forward, (q, k, k, bound, bound, sinks)),
            ("backward", backward, (q, k, k, bound, bound, per_query, per_query, q)),
        ):
            function = partial(_call, function, variant)
            yield Case(
                "flash_attention", backend, direction, inputs, function, arguments, bind_request(refuses, request)
            )


def _call(function: Callable[..., Any], variant: Variant, *arguments: Any) -> Any:
    return function(*arguments, variant)


CASES = (
    *_cases("triton", triton.forward, triton.backward, triton.refuses),
    *_cases("triton_wide", triton_wide.forward, triton_wide.backward, triton_wide.refuses, WIDE_SHAPES),
    *_cases("mosaic", mosaic_forward.forward, mosaic_backward.backward, on_hopper(mosaic_forward.refuses)),
)
