"""Ways to attend (`Attend` of models.attention): within packed rows in training, to a cache in decoding."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxtune.errors import UserError
from jaxtune.models.attention import Attend
from jaxtune.models.call import Call
from jaxtune.models.spec import Heads
from jaxtune.parallel.layout import RULES, P, by_head
from jaxtune.parallel.sequence import from_heads, gathered, to_heads
from pallas_kernels.flash_attention import MaskSpec, flash_attention
from pallas_kernels.registry import CannotRun


def attend_packed(key_start: Int[Array, "b s"], call: Call, place: Int[Array, "b s"] | None = None) -> Attend:
    """Causal attention within the documents of packed rows, by the backend that the call names.

    place: of each position the one in its row, where rows are dealt to devices that keep their positions.
    """
    kept = () if place is None else RULES.value.context
    here = P(*by_head(kept)[:2])
    key_start, own = jax.reshard(key_start, here), None if place is None else jax.reshard(place, here)

    def attend(q: Array, k: Array, v: Array, mixer: Heads, sinks: Array | None, cache: Any) -> tuple[Array, Any]:
        def kernel(q, k, v, key_start, sinks, own, place):
            offset = 0
            if place is not None:
                k, v = gathered(k, place, kept), gathered(v, place, kept)
                offset = own - jnp.arange(own.shape[1])
            mask = MaskSpec(window=mixer.window, key_start=key_start, query_offset=offset, documents=call.documents)
            how = {"soft_cap": mixer.soft_cap, "backend": call.backend, "fallback": call.fallback}
            try:
                return flash_attention(q, k, v, mask, mixer.scale, sinks=sinks, **how)
            except CannotRun as error:
                raise UserError(f"attention.backend={call.backend!r}: {error}; or attention.fallback='warn'") from None

        q, k, v = (to_heads(x, x.shape[2], kept=kept) for x in (q, k, v))
        sinks = None if sinks is None else to_heads(sinks, mixer.heads, axis=0, kept=kept)
        arguments = (q, k, v, key_start, sinks, own, place)
        specs = jax.tree.map(lambda array: jax.typeof(array).sharding.spec, arguments)
        return from_heads(jax.shard_map(kernel, in_specs=specs, out_specs=by_head(kept))(*arguments)), cache

    return attend


def attend_cached(index: Int[Array, ""]) -> Attend:
    """Write keys and values at `index` and attend to everything up to each query."""

    def attend(q: Array, k: Array, v: Array, mixer: Heads, sinks: Array | None, cache: Any) -> tuple[Array, Any]:
        keys, values = cache
        placed = jax.typeof(q).sharding.spec
        q, k, v = (jax.reshard(x, P()) for x in (q, k, v))  # decoding is not sharded: the mesh is one device
        keys = jax.lax.dynamic_update_slice(keys, k.astype(keys.dtype), (0, index, 0, 0))
        values = jax.lax.dynamic_update_slice(values, v.astype(values.dtype), (0, index, 0, 0))

        def kernel(q, keys, values, index, sinks):
            mask = MaskSpec(window=mixer.window, query_offset=index)
            keys, values = keys.astype(q.dtype), values.astype(q.dtype)
            return flash_attention(q, keys, values, mask, mixer.scale, soft_cap=mixer.soft_cap, sinks=sinks)

        sinks = None if sinks is None else jax.reshard(sinks, P())
        attended = jax.shard_map(kernel, in_specs=P(), out_specs=P())(q, keys, values, index, sinks)
        return jax.reshard(attended, placed), (keys, values)

    return attend
