"""Ways to attend (`Attend` of models.attention): within packed rows while training, to a cache while decoding."""

from typing import Any

import jax
from jaxtyping import Array, Int

from jaxtune.models.attention import BY_HEAD, Attend
from jaxtune.parallel.layout import TOKENS, P
from pallas_kernels.flash_attention import MaskSpec, flash_attention


def attend_packed(key_start: Int[Array, "b s"]) -> Attend:
    """Causal attention within the documents of packed rows."""

    def attend(q: Array, k: Array, v: Array, window: int | None, cache: Any) -> tuple[Array, Any]:
        def kernel(q, k, v, key_start):
            return flash_attention(q, k, v, MaskSpec(window=window, key_start=key_start))

        mapped = jax.shard_map(kernel, in_specs=(BY_HEAD, BY_HEAD, BY_HEAD, TOKENS), out_specs=BY_HEAD)
        return mapped(q, k, v, key_start), cache

    return attend


def attend_cached(index: Int[Array, ""]) -> Attend:
    """Write keys and values at `index` and attend to everything up to each query."""

    def attend(q: Array, k: Array, v: Array, window: int | None, cache: Any) -> tuple[Array, Any]:
        keys, values = cache
        layout = jax.typeof(q).sharding.spec
        q, k, v = (jax.reshard(x, P()) for x in (q, k, v))  # decoding is not sharded: the mesh is one device
        keys = jax.lax.dynamic_update_slice(keys, k.astype(keys.dtype), (0, index, 0, 0))
        values = jax.lax.dynamic_update_slice(values, v.astype(values.dtype), (0, index, 0, 0))

        def kernel(q, keys, values, index):
            return flash_attention(
                q, keys.astype(q.dtype), values.astype(q.dtype), MaskSpec(window=window, query_offset=index)
            )

        attended = jax.shard_map(kernel, in_specs=P(), out_specs=P())(q, keys, values, index)
        return jax.reshard(attended, layout), (keys, values)

    return attend
