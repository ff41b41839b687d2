"""Ways to attend (`Attend` of models.attention): within packed rows in training, to a cache in decoding.

Shape letters: b rows of the batch, s positions in a row.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxtune.errors import UserError
from jaxtune.models.forward_options import ForwardOptions
from jaxtune.models.layers.attention import Attend
from jaxtune.models.layers.attention_dropout import attend_dropping, bits_of
from jaxtune.models.structure.mixers import Heads
from jaxtune.parallel.layout import RULES, P, by_head
from jaxtune.parallel.sequence import from_heads, gather_positions, to_heads
from pallas_kernels.flash_attention import MaskSpec, flash_attention
from pallas_kernels.flash_attention.mask import intervals
from pallas_kernels.registry import CannotRun

LOWEST = float(jnp.finfo(jnp.float32).min)


@jax.named_scope("attention")
def attend_packed(
    key_start: Int[Array, "b s"],
    call: ForwardOptions,
    place: Int[Array, "b s"] | None = None,
    key_end: Int[Array, "b s"] | None = None,
) -> Attend:
    """Make attention within the documents of packed rows, with the backend that the call names.

    It is causal without `key_end` and in layers that are `always_causal`; else a query sees the keys from its
    `key_start` up to its `key_end`. Dropout of probabilities uses plain XLA, because no kernel has it.

    place: for each position as devices hold it, its position in the row, if positions are dealt to devices that keep
    them; else None.
    """
    # With `place`, each device keeps its positions along the context axes and gathers keys and values; `local_place` is
    # its own part of `place`.
    along = () if place is None else RULES.value.context
    by_position = P(*by_head(along)[:2])
    key_start = jax.reshard(key_start, by_position)
    key_end, local_place = (None if column is None else jax.reshard(column, by_position) for column in (key_end, place))

    def attend(
        q: Array,
        k: Array | None,
        v: Array | None,
        mixer: Heads,
        sinks: Array | None,
        cache: Any,
        of_layer: ForwardOptions,
    ) -> tuple[Array, Any]:
        ends = None if mixer.always_causal else key_end
        # Without keys and values of its own, a layer gets an earlier layer's as its cache.
        keys_and_values: tuple[Array, Array] = cache if k is None or v is None else (k, v)
        kept = None if mixer.keeps is None else keys_and_values

        def kernel(q, k, v, key_start, key_end, sinks, local_place, place, bits):
            offset = 0
            if place is not None:
                k, v = gather_positions(k, place, along), gather_positions(v, place, along)
                offset = local_place - jnp.arange(local_place.shape[1])  # query i is at position i + offset
            mask = MaskSpec(
                causal=key_end is None,
                window=mixer.window,
                key_start=key_start,
                key_end=key_end,
                query_offset=offset,
                documents=call.documents,
            )
            if bits is not None:
                index = (
                    jnp.arange(key_start.shape[1]) + jnp.zeros_like(key_start) if local_place is None else local_place
                )
                return attend_dropping(q, k, v, mask, mixer, sinks, bits, index)
            how = {"soft_cap": mixer.soft_cap, "backend": call.backend, "fallback": call.fallback}
            try:
                return flash_attention(q, k, v, mask, mixer.scale, sinks=sinks, **how)
            except CannotRun as error:
                raise UserError(f"attention.backend={call.backend!r}: {error}; or attention.fallback='warn'") from None

        q, k, v = (to_heads(x, x.shape[2], kept=along) for x in (q, *keys_and_values))
        sinks = None if sinks is None else to_heads(sinks, mixer.heads, axis=0, kept=along)
        bits = None
        if of_layer.noise is not None and of_layer.attention_dropout:
            bits = bits_of(of_layer.noise, of_layer.attention_dropout, q)
        arguments = (q, k, v, key_start, ends, sinks, local_place, place, bits)
        specs = jax.tree.map(lambda array: jax.typeof(array).sharding.spec, arguments)
        return from_heads(jax.shard_map(kernel, in_specs=specs, out_specs=by_head(along))(*arguments)), kept

    return attend


def attend_cached(
    index: Int[Array, ""], key_start: Int[Array, "b s"], key_end: Int[Array, "b s"] | None = None
) -> Attend:
    """Make attention that writes keys and values at `index` of a cache; queries see keys from `key_start` to their own.

    With `key_end` they see the keys up to it instead, of the keys that are written so far; not in layers that are
    `always_causal`.

    A layer with keys and values gets a slot (`CacheSlot`), and returns the updated arrays of all repeats. Another one
    reads the keys and values that an earlier layer has written, and returns none.

    Each device has whole rows of some heads, and caches their keys and values (`decode.empty_cache`).
    """

    def attend(
        q: Array,
        k: Array | None,
        v: Array | None,
        mixer: Heads,
        sinks: Array | None,
        cache: Any,
        call: ForwardOptions,
    ) -> tuple[Array, Any]:
        def kernel(q, k, v, keys, values, key_start, key_end, sinks, index, place):
            stacked = None
            if k is not None:
                stacked = tuple(  # (repeats, b, t, n, d), at this layer and these positions
                    jax.lax.dynamic_update_slice(old, new[None].astype(old.dtype), (place, 0, index, 0, 0))
                    for old, new in ((keys, k), (values, v))
                )
                keys, values = (jax.lax.dynamic_index_in_dim(one, place, keepdims=False) for one in stacked)
            mask = MaskSpec(
                causal=key_end is None,
                window=mixer.window,
                key_start=key_start,
                key_end=key_end,
                query_offset=index,
            )
            how = mask, mixer.scale, mixer.soft_cap, sinks
            if q.shape[1] == 1:
                return attend_one(q, keys, values, *how), stacked
            keys, values = keys.astype(q.dtype), values.astype(q.dtype)
            return flash_attention(q, keys, values, *how[:2], soft_cap=mixer.soft_cap, sinks=sinks), stacked

        q = to_heads(q, q.shape[2])
        k, v = (None if x is None else to_heads(x, x.shape[2]) for x in (k, v))
        sinks = None if sinks is None else to_heads(sinks, mixer.heads, axis=0)
        (keys, values), place = (cache, None) if k is None else cache
        by_position = P(*by_head()[:2])
        ends = None if key_end is None or mixer.always_causal else jax.reshard(key_end, by_position)
        arguments = (q, k, v, keys, values, jax.reshard(key_start, by_position), ends, sinks, index, place)
        specs = jax.tree.map(lambda array: jax.typeof(array).sharding.spec, arguments)
        outs = by_head(), None if k is None else P(None, *by_head())
        attended, stacked = jax.shard_map(kernel, in_specs=specs, out_specs=outs)(*arguments)
        return from_heads(attended), stacked

    return attend


def attend_one(
    q: Float[Array, "b 1 h d"],
    keys: Float[Array, "b t n d"],
    values: Float[Array, "b t n d"],
    mask: MaskSpec,
    scale: float | None,
    soft_cap: float | None,
    sinks: Float[Array, " h"] | None,
) -> Float[Array, "b 1 h d"]:
    """Attend with one query a row, in float32, as `flash_attention` with the same arguments.

    Sums of elementwise products read each key and value once, directly from the cache. A matrix product would first
    copy the cache to another layout, which takes longer than reading it.
    """
    batch, length, heads, _ = keys.shape
    first, end = intervals(mask, batch, 1, length)
    key = jnp.arange(length)
    seen = ((key >= first) & (key < end))[..., None, None]  # b t 1 1
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    queries = q.reshape(batch, 1, heads, -1, q.shape[-1]).astype(jnp.float32)  # b 1 n g d
    logits = jnp.sum(queries * keys[..., None, :], axis=-1) * factor  # b t n g
    if soft_cap is not None:
        logits = soft_cap * jnp.tanh(logits / soft_cap)
    logits = jnp.where(seen, logits, -jnp.inf)
    top = jnp.max(logits, axis=1, keepdims=True, initial=LOWEST)  # finite even if a query sees no key
    sink = None if sinks is None else sinks.astype(jnp.float32).reshape(heads, -1)  # (n, g): one for each query head
    top = top if sink is None else jnp.maximum(top, sink)
    weights = jnp.exp(logits - top)
    total = jnp.sum(weights, axis=1, keepdims=True)
    total = total if sink is None else total + jnp.exp(sink - top)
    weights /= jnp.where(total > 0, total, 1)  # a query without a key gets 0, not NaN
    attended = jnp.sum(weights[..., None] * values[..., None, :], axis=1)  # b n g d
    return attended.reshape(batch, 1, -1, values.shape[-1]).astype(q.dtype)
