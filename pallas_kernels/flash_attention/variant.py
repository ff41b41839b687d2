"""The static part of an attention, known when it is traced."""

from dataclasses import dataclass

import jax.numpy as jnp


@dataclass(frozen=True)
class Variant:
    """Scale and soft-cap of the logits, and the shape of the mask.

    Kernels mask by the intervals of `mask.intervals`; the mask's shape serves backends that skip blocks while tracing.
    `query_offset` is None where it is known at run time only. `documents` is the most that a packed row holds, None
    where nothing bounds them or rows are not packed.
    """

    scale: float
    soft_cap: float | None
    causal: bool
    window: int | None
    query_offset: int | None
    documents: int | None = None


@dataclass(frozen=True)
class Request:
    """What a backend is asked for: `refuses` of each backend says whether it can."""

    dtype: jnp.dtype
    head_dim: int
    queries: int
    keys: int
    packed: bool
    variant: Variant
    sinks: bool
    return_lse: bool
