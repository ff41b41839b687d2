"""FlashAttention 2 (Dao 2023) and 3 (Shah et al. 2024) by the package dew-flash-attn, for dense and packed rows.

The GPU decides which of the two runs: 3 on Hopper (9.0), 2 on Ampere and Ada (8.x) and GeForce Blackwell (12.x). The
arguments and results are those with which the package's own functions call its kernels (0.3.6). This module calls the
kernels, because the functions ask for the GPU of this machine, which is not the one that a plan compiles for, and their
results lack the mesh axes over which they vary.

All rows are passed as one sequence of documents; a dense row is one document. As for fa3, the number of documents is
static, and rows with a mask that the kernels cannot compute give NaN in every result. An empty document costs memory,
and hardly any time: the backward kernels find the blocks of a document from its offset.

The backward pass accumulates dq with atomics, in any order: two runs differ in the last bits.

Shapes: b batch, s sequence, t = b * s tokens, h query heads, n key heads, d head dimension, N documents.
"""

import importlib
import importlib.util
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from pallas_kernels import cost
from pallas_kernels.flash_attention.blocks import most_flops
from pallas_kernels.flash_attention.differentiate import RESIDUALS
from pallas_kernels.flash_attention.packages.packed_documents import (
    Packing,
    as_rows,
    as_tokens,
    call_kernel,
    pack,
    pack_whole_rows,
)
from pallas_kernels.flash_attention.variant import AttentionRequest, Variant
from pallas_kernels.gpus import Device, current_device

PACKAGE = "dew_flash_attn"
INSTALL = "dew-flash-attn: on Python 3.12 or newer, pip install 'jaxtune[flash-cuda12]', or flash-cuda13"
HOPPER = (9, 0)
# Rows of float32 scratch that the backward kernels may round a document up to.
BLOCK = 128


def refuses(device: Device, request: AttentionRequest) -> str | None:
    """Return why flash cannot run a request on a device, or None; an argument that it would ignore is a reason."""
    capability = device.capability
    if capability is None or (capability != HOPPER and capability[0] not in (8, 12)):
        return "it needs an NVIDIA GPU of compute capability 8.x, 9.0 or 12.x"
    dtype, dim, variant = jnp.dtype(request.dtype), request.head_dim, request.variant
    limits = (
        (dtype not in (jnp.bfloat16, jnp.float16), f"it takes bfloat16 and float16, not {dtype}"),
        (dim % 8 or dim > 256, f"the head dim must be a multiple of 8 and at most 256, not {dim}"),
        (variant.soft_cap is not None, "it does not support a soft-cap"),
        (request.sinks, "it does not support sinks"),
        (request.return_lse, "its backward pass does not take a cotangent of the log-sum-exp"),
        (variant.query_offset != 0, "it does not support a query offset"),
        (
            request.queries != request.keys,
            f"it needs as many keys as queries, not {request.keys} keys and {request.queries} queries",
        ),
        (request.key_end, "it takes the ends of documents, not an end of keys for each query (MaskSpec.key_end)"),
        (request.packed and not variant.causal, "for packed rows it computes only causal attention"),
        (request.packed and variant.documents is None, "packed rows need MaskSpec.documents"),
        (request.packed and variant.window == 1, "a window of 1 hides where documents begin"),
        (importlib.util.find_spec(PACKAGE) is None, f"it needs the package {INSTALL}"),
    )
    return next((reason for refused, reason in limits if refused), None) or cannot_load()


@cache
def cannot_load() -> str | None:
    """Return why the installed package cannot be loaded, or None."""
    try:
        importlib.import_module(PACKAGE)
    except OSError as error:  # the CUDA runtime of its CUDA version is missing
        return f"its package cannot be loaded ({error}): install the extra for the CUDA version of your jax"
    return None


def attend(
    q: Float[Array, "b s h d"],
    k: Float[Array, "b s n d"],
    v: Float[Array, "b s n d"],
    first: Int[Array, "b s"],
    end: Int[Array, "b s"],
    sinks: None,
    variant: Variant,
) -> tuple[Float[Array, "b s h d"], None]:
    """Return the output, differentiable, and None for the log-sum-exp, for a request that `refuses` accepts.

    Rows are packed if `variant.documents` is set.
    """
    importlib.import_module(PACKAGE)._registered()
    if variant.documents is None:
        packing = pack_whole_rows(*first.shape)
    else:
        packing = pack(first, end, variant.window, variant.documents)
    return _attention(q, k, v, packing, variant), None


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attention(q, k, v, packing: Packing, variant: Variant) -> Array:
    return _forward(q, k, v, packing, variant)[0]


def _attention_forward(q, k, v, packing, variant):
    out, lse = checkpoint_name(_forward(q, k, v, packing, variant), RESIDUALS)
    return out, (q, k, v, packing, out, lse)


def _attention_backward(variant, residuals, d_out):
    q, k, v, packing, out, lse = residuals
    return *_backward(q, k, v, packing, out, lse, d_out, variant), None


_attention.defvjp(_attention_forward, _attention_backward)


def _forward(
    q: Float[Array, "b s h d"],
    k: Float[Array, "b s n d"],
    v: Float[Array, "b s n d"],
    packing: Packing,
    variant: Variant,
) -> tuple[Float[Array, "b s h d"], Float[Array, "h t"]]:
    """Return the output and the log-sum-exp."""
    batch, length, heads, _ = q.shape
    flops = most_flops(variant, q, k, 1, 1, products=2)
    q, k, v = (as_tokens(x, packing) for x in (q, k, v))
    documents, tokens = packing.offsets.size - 1, batch * length
    inputs = (q, k, v, packing.offsets, packing.offsets)
    # The last two results belong to kernels that split the keys, which kernels of packed rows do not.
    if current_device().capability == HOPPER:
        results = ((q.shape, q.dtype), ((heads, tokens), jnp.float32), *_unused(4, 3))
        with cost.flops(flops):
            out, lse, *_ = call_kernel(
                "dew_flash3_mha_varlen_fwd", inputs, results, **_hopper(length), **_common(variant)
            )
    else:
        results = ((q.shape, q.dtype), ((documents, heads, length), jnp.float32), *_unused(5, 4))
        lengths = {"max_seqlen_q": np.int32(length), "max_seqlen_k": np.int32(length)}
        attributes = _common(variant) | lengths | {"zero_tensors": False}
        with cost.flops(flops):
            out, lse, *_ = call_kernel("dew_flash_mha_varlen_fwd", inputs, results, **attributes)
        lse = _by_token(lse, packing.offsets, tokens)
    return as_rows(out, packing, batch), lse


def _backward(q, k, v, packing: Packing, out, lse, d_out, variant: Variant) -> tuple[Array, Array, Array]:
    batch, length, heads, width = q.shape
    kv_heads = k.shape[2]
    flops = most_flops(variant, q, k, 1, 1, products=5)
    q, k, v, out, d_out = (as_tokens(x, packing) for x in (q, k, v, out, d_out))
    documents, tokens = packing.offsets.size - 1, batch * length
    offsets = (packing.offsets, packing.offsets)
    if current_device().capability == HOPPER:
        statistics = ((heads * (tokens + BLOCK * (documents + 1)),), jnp.float32)
        results = (*((x.shape, x.dtype) for x in (q, k, v)), statistics, statistics)
        inputs = (d_out, q, k, v, out, lse, *offsets)
        attributes = _common(variant) | _hopper(length)
        with cost.flops(flops), cost.scratch(_scratch(tokens, documents, heads, kv_heads, width)):
            dq, dk, dv, *_ = call_kernel("dew_flash3_mha_varlen_bwd", inputs, results, **attributes)
    else:
        of_queries = ((tokens, heads, width), q.dtype)  # also of keys: one gradient for each query head
        sums = ((documents, heads, _round(length, BLOCK)), jnp.float32)
        sums_of_dq = ((tokens + BLOCK * documents, heads, _round(width, 32)), jnp.float32)
        inputs = (d_out, q, k, v, out, _by_document(lse, packing.offsets, length), *offsets)
        results = (of_queries, of_queries, of_queries, sums, sums_of_dq)
        attributes = _common(variant) | {"max_seqlen_q": np.int64(length), "max_seqlen_k": np.int64(length)}
        attributes |= {"softmax_scale": np.float32(variant.scale), "deterministic": False, "zero_tensors": False}
        with cost.flops(flops):
            dq, dk, dv, *_ = call_kernel("dew_flash_mha_varlen_bwd", inputs, results, **attributes)
        dk, dv = (x.reshape(tokens, kv_heads, -1, width).sum(2) for x in (dk, dv))
    dq, dk, dv = (as_rows(x, packing, batch) for x in (dq, dk, dv))
    return dq, dk, dv


def _common(variant: Variant) -> dict[str, Any]:
    """Return the arguments that all kernels take. Their window counts only the keys before the query's own key."""
    return {
        "softmax_scale": np.float64(variant.scale),
        "is_causal": variant.causal,
        "window_size_left": np.int64(-1 if variant.window is None else variant.window - 1),
        "window_size_right": np.int64(0 if variant.causal else -1),
    }


def _hopper(length: int) -> dict[str, Any]:
    """Return the arguments for the longest document of FlashAttention 3's kernels."""
    return {"max_seqlen": np.int64(length), "max_seqlen_k": np.int64(length)}


def _unused(*ranks: int) -> tuple[tuple[tuple[int, ...], Any], ...]:
    """Return the shapes of results that a kernel declares but does not write."""
    return tuple(((1,) * rank, jnp.float32) for rank in ranks)


def _by_token(lse: Float[Array, "N h s"], offsets: Int[Array, " N+1"], tokens: int) -> Float[Array, "h t"]:
    """Return the log-sum-exp by token; saved for the backward pass, it does not grow with the number of documents."""
    token = jnp.arange(tokens)
    document = jnp.searchsorted(offsets, token, side="right") - 1
    return lse[document, :, token - offsets[document]].T


def _by_document(lse: Float[Array, "h t"], offsets: Int[Array, " N+1"], length: int) -> Float[Array, "N h s"]:
    """Return the log-sum-exp by document, as FlashAttention 2 has it; no kernel reads behind a document's end."""
    token = jnp.minimum(offsets[:-1, None] + jnp.arange(length), lse.shape[1] - 1)
    return lse[:, token].swapaxes(0, 1)


def _scratch(tokens: int, documents: int, heads: int, kv_heads: int, width: int) -> float:
    """Return the bytes of float32 sums that FlashAttention 3's backward kernel allocates itself.

    There are sums of dq, and if query heads share key heads also of dk and dv, in whole blocks for each document.
    """
    sums = heads + (heads != kv_heads) * 2 * kv_heads
    width = next(built for built in (64, 128, 192, 256) if width <= built)  # a narrower head is padded
    return 4.0 * width * sums * (tokens + BLOCK * (documents + 1))


def _round(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
