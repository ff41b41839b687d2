"""Packed rows as FlashAttention's kernels take them: one sequence of all tokens, cut into documents at offsets.

Shapes: b batch, s sequence, h heads, d head dimension.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.manual_axes import vary_over, varying_axes


class Packing(NamedTuple):
    """The documents of packed rows.

    Attributes:
        offsets: position of each document's first token in the sequence of all tokens, ascending; unused entries hold
            the number of tokens.
        sees: False for padding.
        right: whether the kernel can compute this mask.
    """

    offsets: Int[Array, " documents+1"]
    sees: Bool[Array, "b s"]
    right: Bool[Array, ""]


def pack(first: Int[Array, "b s"], end: Int[Array, "b s"], window: int | None, documents: int) -> Packing:
    """Find the documents of packed rows, at most `documents` per row, from the keys that each query sees.

    A run of padding counts as a document too.
    """
    batch, length = first.shape
    index, sees = jnp.arange(length, dtype=jnp.int32), first < end
    # A document begins at a row's first token, where padding begins or ends, and where a query's first key is itself.
    begins = (index == 0) | (sees != jnp.roll(sees, 1, axis=1)) | (sees & (first == index))
    start = jax.lax.cummax(jnp.where(begins, index, 0), axis=1)
    # The first key that the kernel computes for each query, given the start of its document.
    expected = start if window is None else jnp.maximum(start, index - window + 1)
    as_expected = ~sees | ((first == expected) & (end == index + 1))
    max_documents = batch * (documents + 1)  # one more per row, for its padding
    (offsets,) = jnp.nonzero(begins.reshape(-1), size=max_documents + 1, fill_value=first.size)
    right = jnp.all(as_expected) & (jnp.sum(begins) <= max_documents)
    return Packing(offsets.astype(jnp.int32), sees, right)


def pack_whole_rows(batch: int, length: int) -> Packing:
    """Return the documents of rows that are one document each, without padding."""
    offsets = length * jnp.arange(batch + 1, dtype=jnp.int32)
    return Packing(offsets, jnp.ones((batch, length), bool), jnp.bool_(True))


def as_tokens(x: Float[Array, "b s h d"], packing: Packing | None) -> Array:
    """Return the kernel's view of x: x itself, or for packed rows all tokens in one sequence.

    Padding is set to zero, because it may hold NaN and zero times NaN is NaN.
    """
    if packing is None:
        return x
    return jnp.where(packing.sees[..., None, None], x, 0).reshape(-1, *x.shape[2:])


def as_rows(x: Array, packing: Packing | None, batch: int) -> Float[Array, "b s h d"]:
    """Return the kernel's result by row: zero for padding, all NaN if the kernel cannot compute this mask."""
    if packing is None:
        return x
    x = jnp.where(packing.sees[..., None, None], x.reshape(batch, -1, *x.shape[1:]), 0)
    return jnp.where(packing.right, x, jnp.nan)


def call_kernel(
    name: str, inputs: tuple[Array, ...], results: tuple[tuple[tuple[int, ...], Any], ...], **attributes: Any
) -> tuple[Array, ...]:
    """Call a kernel that a package registered.

    Its results have these shapes and dtypes, and vary over the mesh axes over which its inputs vary.
    """
    axes = varying_axes(*inputs)
    kernel = jax.ffi.ffi_call(name, [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in results])
    return vary_over(axes, *kernel(*vary_over(axes, *inputs), **attributes))
