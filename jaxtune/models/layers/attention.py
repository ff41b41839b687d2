"""Grouped-query self-attention: projections, optional query / key norms, rotation, and one way to attend.

Shape letters: b rows of the batch, s positions in a row, d features of the residual stream, h heads (of queries, or of
keys and values); "hd" is all heads' features in one axis, one head after another.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxtune.models.declared import declare_parameter
from jaxtune.models.forward_options import ForwardOptions
from jaxtune.models.layers.linear import Linear, run_linears
from jaxtune.models.layers.norm import NormLayer, divide_by_rms
from jaxtune.models.layers.rope import Rotation, rotate
from jaxtune.models.mixers import Heads, Rope
from jaxtune.models.spec import Layer, ModelSpec
from jaxtune.parallel.layout import by_token

# (queries, keys, values, the layer's heads, sinks, this layer's cache, its call) -> (attended values, updated cache).
# Training attends within packed rows and has no cache; generation attends to its cache. Neither knows the projections.
Attend = Callable[[Array, Array, Array, Heads, Array | None, Any, ForwardOptions], tuple[Array, Any]]


class Inputs(NamedTuple):
    """Inputs that all layers share, in addition to the activations; computed once per batch.

    Attributes:
        rotations: cosines and sines for each pair of a rope and a head width.
        attend: the way to attend.
        positions: position of each token in its document.
        valid: False for padding tokens.
        place: for each position as devices hold it, its position in the row; whole rows, on every device. None: devices
            hold positions in row order.
    """

    rotations: Mapping[tuple[Rope, int], Rotation]
    attend: Attend
    positions: Int[Array, "b s"]
    valid: Bool[Array, "b s"]
    place: Int[Array, "b s"] | None = None


class Attention(nnx.Module):
    """softmax(QK^T)V, with input and output projections."""

    def __init__(self, spec: ModelSpec, layer: Layer, mixer: Heads):
        self.mixer, self.epsilon = mixer, spec.norm.epsilon
        queries, keys = mixer.heads * mixer.head_dim, mixer.kv_heads * mixer.head_dim
        self.kv_axis = None if mixer.kv_whole else "kv_heads"  # None: keys and values are not sharded

        def linear(name: str, shape: tuple[int, int], axes: tuple[str | None, str]) -> Linear:
            return Linear(spec, layer, f"attention.{name}", shape, axes, bias=name in mixer.bias)

        # With fused gates, the rows of q are, head by head, the query's features and then the gate's.
        fused = mixer.gated == "fused"
        self.q = linear("q", (queries * (1 + fused), spec.hidden), ("heads", "embed"))
        self.k = linear("k", (keys, spec.hidden), (self.kv_axis, "embed"))
        self.v = None if mixer.keys_as_values else linear("v", (keys, spec.hidden), (self.kv_axis, "embed"))
        separate = mixer.gated == "separate"
        self.gate = linear("gate", (queries, spec.hidden), ("heads", "embed")) if separate else None
        self.o = linear("o", (spec.hidden, queries), ("embed", "heads"))

        def norm(size: int, axis: str | None) -> NormLayer | None:
            if mixer.qk_norm is None:
                return None
            return (
                NormLayer(size, spec.norm, axis) if mixer.qk_norm == "whole" else NormLayer(mixer.head_dim, spec.norm)
            )

        self.q_norm, self.k_norm = norm(queries, "heads"), norm(keys, self.kv_axis)
        self.sinks = (
            declare_parameter((mixer.heads,), ("heads",), nnx.initializers.zeros, "vector") if mixer.sinks else None
        )

    @jax.named_scope("attention")
    def __call__(
        self, x: Float[Array, "b s d"], inputs: Inputs, cache: Any, call: ForwardOptions
    ) -> tuple[Float[Array, "b s d"], Any]:
        """Return the layer's output and its updated cache."""
        linears = [linear for linear in (self.q, self.k, self.v, self.gate) if linear is not None]
        q, k, *projected = run_linears(linears, x, call)
        gate = None if self.gate is None else projected.pop()
        v = projected[0] if projected else k
        if self.mixer.gated == "fused":
            both = jnp.reshape(q, (*x.shape[:2], -1, 2 * self.mixer.head_dim), out_sharding=by_token("heads", None))
            q, gate = map(merge_heads, jnp.split(both, 2, axis=-1))
        late = self.mixer.qk_norm == "rotated"
        q = self._by_head(q, "heads", None if late else self.q_norm)
        k, v = self._by_head(k, self.kv_axis, None if late else self.k_norm), self._by_head(v, self.kv_axis)
        if self.mixer.v_norm:
            v = divide_by_rms(v.astype(jnp.float32), self.epsilon).astype(v.dtype)
        if (rope := self.mixer.rope) is not None:
            # Keys are rotated before `attend`, so a cache has rotated keys.
            rotation = inputs.rotations[rope, self.mixer.head_dim]
            q, k = rotate(q, rope, rotation), rotate(k, rope, rotation)
            if rotation.query_scale is not None:
                q *= rotation.query_scale.astype(q.dtype)
        if late and self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        sinks = None if self.sinks is None else self.sinks.get_value()
        attended, cache = inputs.attend(q, k, v, self.mixer, sinks, cache, call)
        y = merge_heads(attended)
        return self.o(y if gate is None else y * jax.nn.sigmoid(gate), call), cache

    def _by_head(
        self, x: Float[Array, "b s hd"], axis: str | None, norm: NormLayer | None = None
    ) -> Float[Array, "b s h d"]:
        if norm is not None and self.mixer.qk_norm == "whole":
            x, norm = norm(x), None
        heads = jnp.reshape(x, (*x.shape[:2], -1, self.mixer.head_dim), out_sharding=by_token(axis, None))
        return heads if norm is None else norm(heads)


def merge_heads(by_head: Float[Array, "b s h d"]) -> Float[Array, "b s hd"]:
    """Merge heads and their features into one axis, one head after another."""
    return jnp.reshape(by_head, (*by_head.shape[:2], -1), out_sharding=by_token("heads"))
