"""The static part of an attention call, known when it is traced."""

from dataclasses import dataclass

import jax.numpy as jnp


@dataclass(frozen=True)
class Variant:
    """Scale and soft-cap of the logits, and the shape of the mask.

    Kernels mask by the intervals of `mask.intervals`; the mask's shape is for backends that skip blocks while tracing.

    Attributes:
        scale: factor of q k^T.
        soft_cap: bound of the logits; None: not bounded.
        causal: queries do not see later keys; False with `MaskSpec.key_end`.
        window: number of keys that a query sees, its own included; None: not bounded.
        query_offset: position of the first query among the keys; None: known only at run time.
        documents: the largest number of documents in a packed row; None: not bounded, or rows are not packed.
    """

    scale: float
    soft_cap: float | None
    causal: bool
    window: int | None
    query_offset: int | None
    documents: int | None = None


@dataclass(frozen=True)
class AttentionRequest:
    """The static properties of a call, from which each backend's `refuses` decides whether it can run it.

    Attributes:
        dtype: dtype of q, k and v.
        head_dim: head dimension.
        queries: queries per row.
        keys: keys per row.
        packed: rows may hold several documents.
        variant: scale, soft-cap and shape of the mask.
        sinks: sinks are given.
        return_lse: the log-sum-exp is returned.
        key_end: each query has an end of its keys, `MaskSpec.key_end`.
    """

    dtype: jnp.dtype
    head_dim: int
    queries: int
    keys: int
    packed: bool
    variant: Variant
    sinks: bool
    return_lse: bool
    key_end: bool = False
