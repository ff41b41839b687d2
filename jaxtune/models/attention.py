"""Grouped-query self-attention: projections, optional query / key norms, rotation, and two ways to attend."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxtune.models.dropout import Noise
from jaxtune.models.linear import Linear
from jaxtune.models.norm import RMSNorm
from jaxtune.models.rope import rotate
from jaxtune.models.spec import Layer, ModelSpec
from jaxtune.parallel import layout
from pallas_kernels.flash_attention import MaskSpec, flash_attention

# (queries, keys, values, window, this layer's cache) -> (attended, the cache afterwards). Training attends within
# packed rows and has no cache; generation attends to its cache. Neither knows the projections.
Attend = Callable[[Array, Array, Array, int | None, Any], tuple[Array, Any]]
BY_HEAD = layout.spec("batch", "positions", "heads", None)


class Inputs(NamedTuple):
    """What every layer sees besides its own activations; made once a batch."""

    cos: Float[Array, "b s 1 d"]
    sin: Float[Array, "b s 1 d"]
    attend: Attend


class Attention(nnx.Module):
    """softmax(QK^T)V between projections."""

    def __init__(self, spec: ModelSpec, layer: Layer):
        linear = partial(Linear, spec, layer)
        queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        self.head_dim, self.window = spec.head_dim, layer.window
        self.q = linear("attention.q", (queries, spec.hidden), ("heads", "embed"), spec.qkv_bias)
        self.k = linear("attention.k", (keys, spec.hidden), ("kv_heads", "embed"), spec.qkv_bias)
        self.v = linear("attention.v", (keys, spec.hidden), ("kv_heads", "embed"), spec.qkv_bias)
        self.o = linear("attention.o", (spec.hidden, queries), ("embed", "heads"), spec.output_bias)
        self.q_norm = RMSNorm(spec.head_dim, spec.norm_epsilon) if spec.qk_norm else None
        self.k_norm = RMSNorm(spec.head_dim, spec.norm_epsilon) if spec.qk_norm else None

    def __call__(
        self, x: Float[Array, "b s d"], inputs: Inputs, cache: Any, noise: Noise | None
    ) -> tuple[Float[Array, "b s d"], Any]:
        """Attended activations and this layer's cache afterwards."""
        q, k, v = (self._by_head(linear(x, noise)) for linear in (self.q, self.k, self.v))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, inputs.cos, inputs.sin), rotate(k, inputs.cos, inputs.sin)
        attended, cache = inputs.attend(q, k, v, self.window, cache)
        merged = jnp.reshape(attended, (*x.shape[:2], -1), out_sharding=layout.spec("batch", "positions", "heads"))
        return self.o(merged, noise), cache

    def _by_head(self, x: Float[Array, "b s hd"]) -> Float[Array, "b s h d"]:
        return jnp.reshape(x, (*x.shape[:2], -1, self.head_dim), out_sharding=BY_HEAD)


def attend_packed(key_start: Int[Array, "b s"]) -> Attend:
    """Causal attention within the documents of packed rows."""

    def attend(q: Array, k: Array, v: Array, window: int | None, cache: Any) -> tuple[Array, Any]:
        def kernel(q, k, v, key_start):
            return flash_attention(q, k, v, MaskSpec(window=window, key_start=key_start))

        mapped = jax.shard_map(kernel, in_specs=(BY_HEAD, BY_HEAD, BY_HEAD, layout.TOKENS), out_specs=BY_HEAD)
        return mapped(q, k, v, key_start), cache

    return attend


def attend_cached(index: Int[Array, ""]) -> Attend:
    """Write keys and values at `index` and attend to everything up to each query."""

    def attend(q: Array, k: Array, v: Array, window: int | None, cache: Any) -> tuple[Array, Any]:
        keys, values = cache
        place = jax.typeof(q).sharding.spec
        q, k, v = (jax.reshard(x, jax.P()) for x in (q, k, v))  # decoding is not sharded: the mesh is one device
        keys = jax.lax.dynamic_update_slice(keys, k.astype(keys.dtype), (0, index, 0, 0))
        values = jax.lax.dynamic_update_slice(values, v.astype(values.dtype), (0, index, 0, 0))

        def kernel(q, keys, values, index):
            keys, values = keys.astype(q.dtype), values.astype(q.dtype)
            return flash_attention(q, keys, values, MaskSpec(window=window, query_offset=index))

        attended = jax.shard_map(kernel, in_specs=jax.P(), out_specs=jax.P())(q, keys, values, index)
        return jax.reshard(attended, place), (keys, values)

    return attend
