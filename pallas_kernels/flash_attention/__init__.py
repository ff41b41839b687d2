"""Attention with O(sequence) memory over packed rows: the public op and its backends."""

import math
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import registry
from pallas_kernels.flash_attention import cudnn, triton, triton_wide, xla
from pallas_kernels.flash_attention.differentiate import RESIDUALS, attention
from pallas_kernels.flash_attention.mask import MaskSpec, intervals
from pallas_kernels.flash_attention.packages import fa3, flash
from pallas_kernels.flash_attention.variant import AttentionRequest, Variant
from pallas_kernels.gpus import current_device
from pallas_kernels.manual_axes import vary_over, varying_axes
from pallas_kernels.registry import ANY_GPU, Backend, imported_at_call, on_hopper

__all__ = ["BACKENDS", "RESIDUALS", "MaskSpec", "flash_attention"]

_MOSAIC = "pallas_kernels.flash_attention.mosaic"
# In order of preference. 'auto' chooses only a backend that was checked: Triton and XLA by tests/kernels on a CPU,
# Mosaic by a run on a Hopper GPU, where it was as exact as Triton, and faster. 'auto' never chooses cuDNN, because its
# gradients differed from run to run on that GPU, nor fa3, because Triton comes first and runs every request that fa3
# runs. So a run with 'auto' can always be repeated bit by bit. Nor does it choose flash, or the kernels for wide heads:
# no GPU has run them. For wide heads XLA is faster on paper if documents are long (README.md, "Heads of 512").
BACKENDS = (
    Backend("cudnn", cudnn.attend, cudnn.refuses, {}),
    Backend(
        "mosaic",
        attention(
            imported_at_call(f"{_MOSAIC}.mosaic_forward", "forward"),
            imported_at_call(f"{_MOSAIC}.mosaic_backward", "backward"),
        ),
        on_hopper(imported_at_call(f"{_MOSAIC}.mosaic_forward", "refuses")),
        {(9, 0): "benchmarks/results/nvidia_h200.json"},
    ),
    Backend("triton", attention(triton.forward, triton.backward), triton.refuses, {ANY_GPU: "interpreted tests"}),
    Backend("triton", attention(triton_wide.forward, triton_wide.backward), triton_wide.refuses, {}),
    Backend("fa3", fa3.attend, fa3.refuses, {}),
    Backend("flash", flash.attend, flash.refuses, {}),
    Backend("xla", attention(xla.forward, xla.backward), registry.never_refuses, {ANY_GPU: "tests"}),
)


def flash_attention(
    q: Float[Array, "b s h d"],
    k: Float[Array, "b t n d"],
    v: Float[Array, "b t n d"],
    mask: MaskSpec = MaskSpec(),
    scale: float | None = None,
    *,
    soft_cap: float | None = None,
    sinks: Float[Array, " h"] | None = None,
    return_lse: bool = False,
    backend: str = "auto",
    fallback: str = "error",
) -> Any:
    """Compute softmax attention (Dao et al. 2022) of queries to the keys that `mask` lets them see.

    Shapes: b batch, s queries, t keys, h query heads, n key heads, d head dimension. h is a multiple of n: consecutive
    groups of query heads share a key head (Ainslie et al. 2023), which is not repeated in memory.

    scale: factor of q k^T; d^-0.5 unless given. soft_cap: bounds the logits to cap * tanh(logits / cap) (Gemma 2).
    sinks: one logit per head, added only to the denominator (gpt-oss). return_lse: return the log-sum-exp too.
    backend: 'auto', or a name in BACKENDS. fallback: 'warn' chooses by 'auto' if the backend cannot run this call on
    the current device.

    Returns (b, s, h, d); with `return_lse` also the natural logarithm of the denominator, sinks included, as float32
    (b, h, s). Products are computed in the inputs' dtype (bfloat16, float16, float32) and accumulated in float32.
    Results repeat bit by bit, except for gradients of fa3 and flash, and of cuDNN without XLA's option
    xla_gpu_deterministic_ops.

    Differentiable in q, k, v and sinks, through both results. Under jax.checkpoint the backward pass runs the forward
    kernel again unless the policy saves the residuals named RESIDUALS (cuDNN always runs it again).

    Raises ValueError for shapes that do not fit together, and registry.CannotRun for a backend that cannot run.
    """
    variant = _variant(q, k, v, mask, scale, soft_cap, sinks)
    request = AttentionRequest(
        dtype=q.dtype,
        head_dim=q.shape[3],
        queries=q.shape[1],
        keys=k.shape[1],
        packed=mask.key_start is not None,
        variant=variant,
        sinks=sinks is not None,
        return_lse=return_lse,
        key_end=mask.key_end is not None,
    )
    chosen = registry.choose("flash_attention", BACKENDS, current_device(), request, backend, fallback)
    if chosen.name == "cudnn":
        return chosen.run(q, k, v, variant)
    first, end = intervals(mask, q.shape[0], q.shape[1], k.shape[1])
    arrays = (q, k, v, first, end, sinks)
    out, lse = chosen.run(*vary_over(varying_axes(*arrays), *arrays), variant)
    return (out, lse) if return_lse else out


def _variant(q, k, v, mask: MaskSpec, scale, soft_cap, sinks) -> Variant:
    """Check the shapes of a call and return its static part."""

    def check(ok: bool, message: str) -> None:
        if not ok:
            raise ValueError(f"flash_attention: {message}")

    check(q.ndim == k.ndim == v.ndim == 4, "q, k and v are (batch, sequence, heads, head_dim)")
    (batch, queries, heads, dim), kv_heads = q.shape, k.shape[2]
    check(k.shape == v.shape, f"k {k.shape} and v {v.shape} differ in shape")
    check(k.shape[0] == batch and k.shape[3] == dim, f"q {q.shape} and k {k.shape} differ in batch or head_dim")
    check(heads % kv_heads == 0, f"{heads} query heads are not a multiple of {kv_heads} key heads")
    check(
        q.dtype == k.dtype == v.dtype, f"q, k and v have dtypes {q.dtype}, {k.dtype} and {v.dtype}; they must be equal"
    )
    check(
        q.dtype in (jnp.bfloat16, jnp.float16, jnp.float32),
        f"dtype {q.dtype}; bfloat16, float16 and float32 are supported",
    )
    # In the kernels, offsets within an array are signed 32-bit integers.
    check(max(q.size, k.size) <= 2**31, f"{max(q.size, k.size)} elements; at most 2^31 are supported")
    for name, bound in (("key_start", mask.key_start), ("key_end", mask.key_end)):
        if bound is not None:
            check(bound.shape == (batch, queries), f"{name} {bound.shape} is not {(batch, queries)}")
    offsets = jnp.shape(mask.query_offset)
    check(offsets in ((), (batch, queries)), f"query_offset {offsets} is neither a scalar nor {(batch, queries)}")
    if sinks is not None:
        check(sinks.shape == (heads,), f"sinks {sinks.shape} is not {(heads,)}")
    scale = dim**-0.5 if scale is None else scale
    check(scale > 0 and math.isfinite(scale), f"scale must be positive, not {scale}")
    check(soft_cap is None or soft_cap > 0, f"soft_cap must be positive, not {soft_cap}")
    offset = mask.query_offset if isinstance(mask.query_offset, int) else None
    return Variant(float(scale), soft_cap, mask.causal, mask.window, offset, mask.documents)
