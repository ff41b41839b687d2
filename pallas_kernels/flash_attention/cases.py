"""Compile cases of flash attention: packed rows, grouped queries, and ends of keys, by dtype and head dimension."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.case import Case, bind_request
from pallas_kernels.flash_attention import triton, triton_wide
from pallas_kernels.flash_attention.mask import MaskSpec, intervals
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
# With `MaskSpec.key_end`: the heads of a decoder, and those of SigLIP's tower of images.
SHAPES_WITH_ENDS = (("bfloat16", 128, None), ("bfloat16", 72, None))


def _cases(
    backend: str,
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    refuses: Callable[[Device, AttentionRequest], str | None],
    shapes: Iterable[tuple[str, int, float | None]] = SHAPES,
    ends: bool = False,
) -> Iterator[Case]:
    for dtype, head_dim, soft_cap in shapes:
        variant = Variant(head_dim**-0.5, soft_cap, not ends, None, 0)
        request = AttentionRequest(
            jnp.dtype(dtype), head_dim, LENGTH, LENGTH, True, variant, soft_cap is not None, True, ends
        )
        q = jax.ShapeDtypeStruct((ROWS, LENGTH, HEADS, head_dim), dtype)
        k = jax.ShapeDtypeStruct((ROWS, LENGTH, KV_HEADS, head_dim), dtype)
        bound = jax.ShapeDtypeStruct((ROWS, LENGTH), jnp.int32)
        per_query = jax.ShapeDtypeStruct((ROWS, HEADS, LENGTH), jnp.float32)
        sinks = None if soft_cap is None else jax.ShapeDtypeStruct((HEADS,), jnp.float32)
        inputs = f"{dtype} d={head_dim}" + ("" if soft_cap is None else " soft-cap, sinks") + ends * " key_end"
        for direction, function, arguments in (
            ("forward", forward, (q, k, k, bound, bound, sinks)),
            ("backward", backward, (q, k, k, bound, bound, per_query, per_query, q)),
        ):
            function = partial(_call_with_ends if ends else _call, function, variant)
            yield Case(
                "flash_attention", backend, direction, inputs, function, arguments, bind_request(refuses, request)
            )


def _call(function: Callable[..., Any], variant: Variant, *arguments: Any) -> Any:
    return function(*arguments, variant)


def _call_with_ends(function: Callable[..., Any], variant: Variant, q, k, v, key_start, key_end, *rest: Any) -> Any:
    mask = MaskSpec(causal=False, key_start=key_start, key_end=key_end)
    return function(q, k, v, *intervals(mask, q.shape[0], q.shape[1], k.shape[1]), *rest, variant)


_BACKENDS = (
    ("triton", triton.forward, triton.backward, triton.refuses),
    ("mosaic", mosaic_forward.forward, mosaic_backward.backward, on_hopper(mosaic_forward.refuses)),
)
CASES = (
    *(case for backend in _BACKENDS for case in _cases(*backend)),
    *(case for backend in _BACKENDS for case in _cases(*backend, SHAPES_WITH_ENDS, ends=True)),
    *_cases("triton_wide", triton_wide.forward, triton_wide.backward, triton_wide.refuses, WIDE_SHAPES),
)
