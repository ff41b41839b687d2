"""FlashAttention-3 (Shah et al. 2024) for Hopper by the package flash-attn3-jax: dense and packed rows, with a window.

Importing the package registers its kernels with XLA. This module calls the kernels, not the package's functions, for
two reasons: the functions allocate (documents, h, s) for the log-sum-exp of packed rows although the kernel writes
(h, tokens), and their results lack the mesh axes over which they vary. XLA refuses a version whose kernels take other
arguments.

Packed rows are passed as one sequence of all tokens, cut into documents at offsets (FlashAttention's cu_seqlens). The
number of offsets is static: `MaskSpec.documents` per row. Unused offsets denote empty documents. According to its
sources the kernel is correct with any number of empty documents, but each costs something: the backward pass launches
s / 64 idle thread blocks for each document and head (sized for the longest row), and keeps 64 more rows of float32 sums
for each document. So the caller chooses this bound; the number of tokens would be a bound for every packing, but too
large. A run of padding is a document too, whose results are discarded.

Rows with a mask that the kernel cannot compute (more documents, or a key_start that is not the beginning of a document)
give NaN in every result, because the offsets are known only at run time.

The backward pass accumulates dq with atomics, in any order: two runs differ in the last bits.

Shapes: b batch, s sequence, h query heads, n key heads, d head dimension.
"""

import importlib.util
import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from pallas_kernels import cost
from pallas_kernels.flash_attention.blocks import most_flops
from pallas_kernels.flash_attention.differentiate import RESIDUALS
from pallas_kernels.flash_attention.packages.packed_documents import Packing, as_rows, as_tokens, call_kernel, pack
from pallas_kernels.flash_attention.variant import AttentionRequest, Variant
from pallas_kernels.gpus import Device

PACKAGE = "flash_attn3_jax"
INSTALL = "flash-attn3-jax: pip install 'jaxtune[hopper]'"
# The backward kernel pads each document to whole blocks: this number of keys, and fewer queries.
BLOCK = 128


def refuses(device: Device, request: AttentionRequest) -> str | None:
    """Return why fa3 cannot run a request on a device, or None; an argument that it would ignore is a reason."""
    if device.capability != (9, 0):
        return "it needs a Hopper GPU (compute capability 9.0)"
    dtype, variant = jnp.dtype(request.dtype), request.variant
    limits = (
        (dtype not in (jnp.bfloat16, jnp.float16), f"it takes bfloat16 and float16, not {dtype}"),
        (request.head_dim != 128, f"its published wheels have kernels only for head_dim 128, not {request.head_dim}"),
        (variant.soft_cap is not None, "a soft-cap is not passed on to it"),
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
    return next((reason for refused, reason in limits if refused), None)


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
    importlib.import_module(PACKAGE)
    packing = None if variant.documents is None else pack(first, end, variant.window, variant.documents)
    return _attention(q, k, v, packing, variant), None


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attention(q, k, v, packing: Packing | None, variant: Variant) -> Array:
    return _forward(q, k, v, packing, variant)[0]


def _attention_forward(q, k, v, packing, variant):
    out, lse = checkpoint_name(_forward(q, k, v, packing, variant), RESIDUALS)
    return out, (q, k, v, packing, out, lse)


def _attention_backward(variant, residuals, d_out):
    q, k, v, packing, out, lse = residuals
    return *_backward(q, k, v, packing, out, lse, d_out, variant), None


_attention.defvjp(_attention_forward, _attention_backward)


def _forward(q, k, v, packing: Packing | None, variant: Variant) -> tuple[Array, Array]:
    """Return the output and the log-sum-exp, which is (b, h, s), or (h, b * s) for packed rows."""
    batch, length, heads, _ = q.shape
    flops = most_flops(variant, q, k, 1, 1, products=2)
    q, k, v = (as_tokens(x, packing) for x in (q, k, v))
    lse = (batch, heads, length) if packing is None else (heads, batch * length)
    offsets = _offsets(q, packing)
    no_int, no_array = _absent(q, jnp.int32), _absent(q, q.dtype)
    # The kernel takes its arguments by position, absent ones included: after q, k and v come new keys and values and
    # more of q; then offsets; then lengths, pages and left padding; rotary embedding; scales; a schedule.
    absent = (*(no_int,) * 5, *(no_array,) * 2, no_int, *(_absent(q, jnp.float32),) * 3, no_int)
    inputs = (q, k, v, *(no_array,) * 3, *offsets, *absent)
    # The last two results belong to a kernel that splits the keys; with num_splits=1 they are not used.
    results = ((q.shape, q.dtype), (lse, jnp.float32), ((1,) * 4, jnp.float32), ((1,) * 3, jnp.float32))
    with cost.flops(flops):
        out, lse, *_ = call_kernel(
            "flash_mha_fwd",
            inputs,
            results,
            max_seqlen_q=length,
            max_seqlen_q_has_value=True,
            max_seqlen_k=length,
            max_seqlen_k_has_value=True,
            pack_gqa_val=False,
            pack_gqa_has_value=False,
            attention_chunk=0,
            is_rotary_interleaved=False,
            num_splits=1,
            **_common(variant),
        )
    return as_rows(out, packing, batch), lse


def _backward(q, k, v, packing: Packing | None, out, lse, d_out, variant: Variant) -> tuple[Array, Array, Array]:
    batch, length, heads, _ = q.shape
    flops = most_flops(variant, q, k, 1, 1, products=5)
    q, k, v, out, d_out = (as_tokens(x, packing) for x in (q, k, v, out, d_out))
    offsets, absent = _offsets(q, packing), _absent(q, jnp.int32)
    if packing is None:
        statistics = (batch, heads, _whole_blocks(length))
    else:
        statistics = (heads, _whole_blocks(batch * length + (offsets[0].size - 1) * BLOCK))
    results = (*((x.shape, x.dtype) for x in (q, k, v)), *((statistics, jnp.float32),) * 2)
    with cost.flops(flops), cost.scratch(_scratch(q, k, packing, variant)):
        dq, dk, dv, *_ = call_kernel(
            "flash_mha_bwd",
            (d_out, q, k, v, out, lse, *offsets[:2], absent, absent),
            results,
            max_seqlen_q_val=length,
            max_seqlen_q_has_value=True,
            max_seqlen_k_val=length,
            max_seqlen_k_has_value=True,
            deterministic=False,
            **_common(variant),
        )
    dq, dk, dv = (as_rows(x, packing, batch) for x in (dq, dk, dv))
    return dq, dk, dv


def _common(variant: Variant) -> dict[str, Any]:
    """Return the arguments that both kernels take.

    Their window counts only the keys before the query's own key; ours includes it.
    """
    return {
        "softmax_scale_val": variant.scale,
        "softmax_scale_has_value": True,
        "is_causal": variant.causal,
        "window_size_left": -1 if variant.window is None else variant.window - 1,
        "window_size_right": 0 if variant.causal else -1,
        "softcap": 0.0,
        "sm_margin": 0,
    }


def _offsets(q: Array, packing: Packing | None) -> tuple[Array, Array, Array]:
    """Return the offsets of queries, of keys, and of new keys (always absent)."""
    absent = _absent(q, jnp.int32)
    return (absent, absent, absent) if packing is None else (packing.offsets, packing.offsets, absent)


def _absent(q: Array, dtype: Any) -> Array:
    """Return an empty array, which the kernels take as an argument that is not given.

    It is sliced from q, not a constant: a loop over layers hoists constants, and jax 0.11's partitioner crashes on
    empty constants.
    """
    return q.reshape(-1)[:0].astype(dtype)


def _scratch(q: Array, k: Array, packing: Packing | None, variant: Variant) -> float:
    """Return the bytes of the backward kernel's float32 sums, which have whole blocks for each document.

    There are sums of dq, and if query heads share key heads also of dk and dv.
    """
    rows = math.prod(q.shape[:-2])
    documents = q.shape[0] if packing is None else packing.offsets.size - 1
    block_q, heads, kv_heads = 64 if variant.causal else 80, q.shape[-2], k.shape[-2]
    sums = heads * (rows + documents * block_q) + (heads != kv_heads) * 2 * kv_heads * (rows + documents * BLOCK)
    return 4.0 * q.shape[-1] * sums


def _whole_blocks(rows: int) -> int:
    return -(-rows // BLOCK) * BLOCK
