"""Masks of attention. Every mask is an interval of keys per query, so no (queries, keys) array is made."""

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Int


@dataclass(frozen=True)
class MaskSpec:
    """The keys j that the query at index i sees, with p = i + query_offset its position among the keys.

    A query may see no key at all: its output is 0, its log-sum-exp is -inf (or its sink), it gives no gradient, and its
    values, NaN included, reach no other token. Padding is made of such queries: key_start = the number of keys.

    Attributes:
        causal: j <= p.
        window: j > p - window.
        key_start: (b, s), j >= key_start[i]: the packing of documents in rows.
        query_offset: an int; or a traced int32 scalar (decoding into a cache); or an int32 array (b, s), if the queries
            are only some of a row's tokens. Kernels load blocks of keys in vain unless the queries of a block are
            consecutive in the row.
        documents: with key_start, the largest number of documents in a row. fa3 needs it; other backends ignore it.
        key_end: (b, s), j < key_end[i], with causal=False: queries that see later keys, as the patches of an image do,
            and the tokens of a document in an encoder or of a prefix. What is causal there has key_end = p + 1.
    """

    causal: bool = True
    window: int | None = None
    key_start: Int[Array, "b s"] | None = None
    query_offset: int | Int[Array, ""] | Int[Array, "b s"] = 0
    documents: int | None = None
    key_end: Int[Array, "b s"] | None = None

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise ValueError(f"MaskSpec: window must be at least 1, not {self.window}")
        if self.key_end is not None and self.causal:
            raise ValueError("MaskSpec: key_end needs causal=False, because causal=True hides all keys after a query")
        if self.window is not None and not self.causal and self.key_end is None:
            raise ValueError(
                "MaskSpec: a window needs causal=True or key_end, because it only limits how far back a query sees"
            )
        if self.documents is not None and (self.key_start is None or self.documents < 1):
            raise ValueError(f"MaskSpec: documents={self.documents} must be at least 1, and needs key_start")


def intervals(mask: MaskSpec, batch: int, queries: int, keys: int) -> tuple[Int[Array, "b s"], Int[Array, "b s"]]:
    """Return the first key that each query sees and the end of its keys; (0, 0) for a query that sees no key."""
    position = jnp.arange(queries, dtype=jnp.int32) + mask.query_offset
    first = jnp.zeros((batch, queries), jnp.int32) if mask.key_start is None else mask.key_start.astype(jnp.int32)
    first = jnp.maximum(first, 0)
    if mask.window is not None:
        first = jnp.maximum(first, position - mask.window + 1)
    if mask.key_end is not None:
        end = jnp.minimum(mask.key_end.astype(jnp.int32), keys)
    else:
        end = jnp.minimum(position + 1, keys) if mask.causal else jnp.full_like(first, keys)
    end = jnp.broadcast_to(end, first.shape)
    sees = first < end
    return jnp.where(sees, first, 0), jnp.where(sees, end, 0)
