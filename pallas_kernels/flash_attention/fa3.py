"""FlashAttention-3 (Shah et al. 2024) for Hopper by the package flash-attn3-jax: dense and packed rows, with a window.

The package's import registers its kernels with XLA; they are called here and not through its functions, which give the
log-sum-exp of packed rows a buffer of (documents, h, s) where the kernel writes (h, tokens), and whose results do not
say over which mesh axes they vary. A version whose kernels take other arguments is refused by XLA.

Packed rows are one sequence of all their tokens, cut into documents at offsets (FlashAttention's cu_seqlens), whose
number is part of the program: `MaskSpec.documents` a row. Offsets that are left over are those of empty documents. By
its sources the kernel is right with any number of them, but they are not free: the backward pass launches blocks of
threads for the longest row, s / 64 for each document and head, which find nothing to do, and keeps room for 64 rows
more of its float32 sums for each. So it is a bound that a caller chooses, and not the number of tokens, which would be
one for every packing. Padding is documents of its own, whose results are thrown away.

Rows that are not what the kernel computes (more documents, or a key_start that is not the beginning of a document) give
NaN in every result, as the offsets are known at run time only.

The backward pass adds to dq by atomics, in any order: two runs differ in the last bits.
"""

import importlib.util
import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import cost
from pallas_kernels.flash_attention.blocks import most_flops
from pallas_kernels.flash_attention.differentiate import RESIDUALS
from pallas_kernels.flash_attention.variant import Request, Variant
from pallas_kernels.gpus import Device
from pallas_kernels.manual_axes import vary_over, varying_axes

PACKAGE = "flash_attn3_jax"
# The backward kernel pads each document to whole blocks, of this many keys and fewer queries.
BLOCK = 128


class Packing(NamedTuple):
    """The documents of packed rows.

    offsets: where each begins in the sequence of all tokens, ascending; the number of tokens where there are no more.
    sees: False for padding. right: whether the kernel computes this mask.
    """

    offsets: Int[Array, " documents+1"]
    sees: Bool[Array, "b s"]
    right: Bool[Array, ""]


def refuses(device: Device, request: Request) -> str | None:
    """Why it cannot run a request on a device, or None; whatever it would ignore is a reason."""
    if device.capability != (9, 0):
        return "it needs a Hopper GPU (compute capability 9.0)"
    dtype, variant = jnp.dtype(request.dtype), request.variant
    limits = (
        (dtype not in (jnp.bfloat16, jnp.float16), f"it takes bfloat16 and float16, not {dtype}"),
        (request.head_dim != 128, f"its published wheels hold kernels for head_dim 128 alone, not {request.head_dim}"),
        (variant.soft_cap is not None, "it is not asked for a soft-cap"),
        (request.sinks, "it knows no sinks"),
        (request.return_lse, "its backward pass takes no cotangent of the log-sum-exp"),
        (variant.query_offset != 0, "it knows no query offset"),
        (
            request.queries != request.keys,
            f"it wants as many keys as queries, not {request.keys} and {request.queries}",
        ),
        (request.packed and not variant.causal, "of packed rows it computes causal attention alone"),
        (request.packed and variant.documents is None, "packed rows need MaskSpec.documents"),
        (request.packed and variant.window == 1, "a window of 1 hides where documents begin"),
        (
            importlib.util.find_spec(PACKAGE) is None,
            "the package flash-attn3-jax is not installed: pip install 'jaxtune[hopper]'",
        ),
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
    """Output, differentiable, and no log-sum-exp, of requests that `refuses` does not refuse.

    Rows are packed where `variant` bounds their documents.
    """
    importlib.import_module(PACKAGE)
    packing = None if variant.documents is None else _packing(first, end, variant.window, variant.documents)
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


def _packing(first: Int[Array, "b s"], end: Int[Array, "b s"], window: int | None, documents: int) -> Packing:
    """The documents of packed rows, at most so many a row, from what each query sees; a run of padding is one too."""
    batch, length = first.shape
    index, sees = jnp.arange(length, dtype=jnp.int32), first < end
    begins = (index == 0) | (sees != jnp.roll(sees, 1, axis=1)) | (sees & (first == index))
    start = jax.lax.cummax(jnp.where(begins, index, 0), axis=1)
    expected = start if window is None else jnp.maximum(start, index - window + 1)
    as_expected = ~sees | ((first == expected) & (end == index + 1))
    most = batch * (documents + 1)  # and the padding of each row
    (offsets,) = jnp.nonzero(begins.reshape(-1), size=most + 1, fill_value=first.size)
    right = jnp.all(as_expected) & (jnp.sum(begins) <= most)
    return Packing(offsets.astype(jnp.int32), sees, right)


def _forward(q, k, v, packing: Packing | None, variant: Variant) -> tuple[Array, Array]:
    """Output, and log-sum-exp: (b, h, s), of packed rows (h, b * s)."""
    batch, length, heads, _ = q.shape
    flops = most_flops(variant, q, k, 1, 1, products=2)
    q, k, v = (_tokens(x, packing) for x in (q, k, v))
    lse = (batch, heads, length) if packing is None else (heads, batch * length)
    offsets = _offsets(q, packing)
    none, nothing = _absent(q, jnp.int32), _absent(q, q.dtype)
    # New keys and values, more of q; offsets; lengths, pages and left padding; rotary embedding; scales; a schedule.
    absent = (*(none,) * 5, *(nothing,) * 2, none, *(_absent(q, jnp.float32),) * 3, none)
    inputs = (q, k, v, *(nothing,) * 3, *offsets, *absent)
    # The last two results are of a kernel that splits the keys, which this does not.
    results = ((q.shape, q.dtype), (lse, jnp.float32), ((1,) * 4, jnp.float32), ((1,) * 3, jnp.float32))
    with cost.flops(flops):
        out, lse, *_ = _call(
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
    return _rows(out, packing, batch), lse


def _backward(q, k, v, packing: Packing | None, out, lse, d_out, variant: Variant) -> tuple[Array, Array, Array]:
    batch, length, heads, _ = q.shape
    flops = most_flops(variant, q, k, 1, 1, products=5)
    q, k, v, out, d_out = (_tokens(x, packing) for x in (q, k, v, out, d_out))
    offsets, none = _offsets(q, packing), _absent(q, jnp.int32)
    if packing is None:
        statistics = (batch, heads, _whole_blocks(length))
    else:
        statistics = (heads, _whole_blocks(batch * length + (offsets[0].size - 1) * BLOCK))
    results = (*((x.shape, x.dtype) for x in (q, k, v)), *((statistics, jnp.float32),) * 2)
    with cost.flops(flops), cost.scratch(_scratch(q, k, packing, variant)):
        dq, dk, dv, *_ = _call(
            "flash_mha_bwd",
            (d_out, q, k, v, out, lse, *offsets[:2], none, none),
            results,
            max_seqlen_q_val=length,
            max_seqlen_q_has_value=True,
            max_seqlen_k_val=length,
            max_seqlen_k_has_value=True,
            deterministic=False,
            **_common(variant),
        )
    dq, dk, dv = (_rows(x, packing, batch) for x in (dq, dk, dv))
    return dq, dk, dv


def _call(
    name: str, inputs: tuple[Array, ...], results: tuple[tuple[tuple[int, ...], Any], ...], **attributes: Any
) -> tuple[Array, ...]:
    """A kernel of the package, for results of these shapes and dtypes, which vary over the mesh axes of its inputs."""
    axes = varying_axes(*inputs)
    kernel = jax.ffi.ffi_call(name, [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in results])
    return vary_over(axes, *kernel(*vary_over(axes, *inputs), **attributes))


def _common(variant: Variant) -> dict[str, Any]:
    """Arguments of both kernels. Their window counts the keys before the query's own, ours includes it."""
    return {
        "softmax_scale_val": variant.scale,
        "softmax_scale_has_value": True,
        "is_causal": variant.causal,
        "window_size_left": -1 if variant.window is None else variant.window - 1,
        "window_size_right": 0 if variant.causal else -1,
        "softcap": 0.0,
        "sm_margin": 0,
    }


def _tokens(x: Float[Array, "b s h d"], packing: Packing | None) -> Array:
    """What the kernel reads: of packed rows all tokens in a sequence, padding zero, as zero times NaN is NaN."""
    if packing is None:
        return x
    return jnp.where(packing.sees[..., None, None], x, 0).reshape(-1, *x.shape[2:])


def _rows(x: Array, packing: Packing | None, batch: int) -> Float[Array, "b s h d"]:
    """What the kernel wrote, by row: zero for padding, NaN where it was not asked for the mask."""
    if packing is None:
        return x
    x = jnp.where(packing.sees[..., None, None], x.reshape(batch, -1, *x.shape[1:]), 0)
    return jnp.where(packing.right, x, jnp.nan)


def _offsets(q: Array, packing: Packing | None) -> tuple[Array, Array, Array]:
    """Of queries, of keys, and of new keys, of which there are none."""
    none = _absent(q, jnp.int32)
    return (none, none, none) if packing is None else (packing.offsets, packing.offsets, none)


def _absent(q: Array, dtype: Any) -> Array:
    """To the kernels, an argument that is not given.

    It is cut from q: a loop over layers takes constants from outside, and jax 0.11's partitioner crashes on empty ones.
    """
    return q.reshape(-1)[:0].astype(dtype)


def _scratch(q: Array, k: Array, packing: Packing | None, variant: Variant) -> float:
    """Bytes of the float32 sums of dq, and where query heads share keys of dk and dv, in whole blocks a document."""
    rows = math.prod(q.shape[:-2])
    documents = q.shape[0] if packing is None else packing.offsets.size - 1
    block_q, heads, kv_heads = 64 if variant.causal else 80, q.shape[-2], k.shape[-2]
    sums = heads * (rows + documents * block_q) + (heads != kv_heads) * 2 * kv_heads * (rows + documents * BLOCK)
    return 4.0 * q.shape[-1] * sums


def _whole_blocks(rows: int) -> int:
    return -(-rows // BLOCK) * BLOCK
