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
from jaxtune.models.structure.layer_spec import Layer
from jaxtune.models.structure.mixers import Heads, Rope
from jaxtune.models.structure.model_spec import ModelSpec
from jaxtune.models.vision.image_tokens import ImageTokens
from jaxtune.parallel.layout import by_token

# (queries, keys, values, the layer's heads, sinks, this layer's cache, its call) -> (attended values, updated cache).
# Training attends within packed rows and has no cache; generation attends to its cache. Neither knows the projections.
# For later layers (`Heads.keeps`), training too returns a "cache": keys and values. A layer that takes them has none of
# its own, and gets that cache.
Attend = Callable[[Array, Array | None, Array | None, Heads, Array | None, Any, ForwardOptions], tuple[Array, Any]]


class Inputs(NamedTuple):
    """Inputs that all layers share, in addition to the activations; computed once per batch.

    Attributes:
        rotations: cosines and sines for each pair of a rope and a head width.
        attend: the way to attend.
        positions: position of each token in its document.
        valid: False for padding tokens.
        place: for each position as devices hold it, its position in the row; whole rows, on every device. None: devices
            hold positions in row order.
        layer_embeddings: embeddings for each layer, with a leading axis of layers; inside a layer only its own, without
            that axis. None: the model has none.
        routed_experts: the experts that tokens go to, for each stack (repeats, mixtures of a period, b, s, k), or None
            for a stack without mixtures; inside a layer only its own, (b, s, k). The router chooses if it is -1 or
            None.
        kept: the caches that earlier layers keep for later ones (`Heads.keeps`).
        images: the outputs of the vision tower at image tokens; None: the batch has none.
        visual: whether a token is one of `Vision.visual_tokens`; None: there are none.
    """

    rotations: Mapping[tuple[Rope, int], Rotation]
    attend: Attend
    positions: Int[Array, "b s"]
    valid: Bool[Array, "b s"]
    place: Int[Array, "b s"] | None = None
    layer_embeddings: Float[Array, "..."] | None = None
    routed_experts: Any = None
    kept: Mapping[str, Any] = {}
    images: ImageTokens | None = None
    visual: Bool[Array, "b s"] | None = None


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
        own = mixer.takes is None
        self.k = linear("k", (keys, spec.hidden), (self.kv_axis, "embed")) if own else None
        self.v = None if mixer.keys_as_values or not own else linear("v", (keys, spec.hidden), (self.kv_axis, "embed"))
        separate = mixer.gated == "separate"
        self.gate = linear("gate", (queries, spec.hidden), ("heads", "embed")) if separate else None
        self.o = linear("o", (spec.hidden, queries), ("embed", "heads"))

        def norm(size: int, axis: str | None) -> NormLayer | None:
            if mixer.qk_norm is None:
                return None
            return (
                NormLayer(size, spec.norm, axis) if mixer.qk_norm == "whole" else NormLayer(mixer.head_dim, spec.norm)
            )

        self.q_norm, self.k_norm = norm(queries, "heads"), norm(keys, self.kv_axis) if own else None
        self.sinks = (
            declare_parameter((mixer.heads,), ("heads",), nnx.initializers.zeros, "vector") if mixer.sinks else None
        )

    @jax.named_scope("attention")
    def __call__(
        self, x: Float[Array, "b s d"], inputs: Inputs, cache: Any, call: ForwardOptions
    ) -> tuple[Float[Array, "b s d"], Any]:
        """Return the layer's output and its updated cache."""
        linears = [linear for linear in (self.q, self.k, self.v, self.gate) if linear is not None]
        q, *projected = run_linears(linears, x, call)
        gate = None if self.gate is None else projected.pop()
        if self.mixer.gated == "fused":
            both = jnp.reshape(q, (*x.shape[:2], -1, 2 * self.mixer.head_dim), out_sharding=by_token("heads", None))
            q, gate = map(merge_heads, jnp.split(both, 2, axis=-1))  # (b, s, h, 2 d) -> (b, s, hd), twice
        rotation = None if self.mixer.rope is None else inputs.rotations[self.mixer.rope, self.mixer.head_dim]
        q, k, v = self._with_rope(q, "heads", self.q_norm, rotation), None, None
        if rotation is not None and rotation.query_scale is not None:
            q *= rotation.query_scale.astype(q.dtype)
        if self.mixer.takes is None:
            # Keys are rotated before `attend`, so a cache has rotated keys.
            k = self._with_rope(projected[0], self.kv_axis, self.k_norm, rotation)
            v = self._by_head(projected[-1], self.kv_axis)  # if they have no projection: the keys' output
            if self.mixer.v_norm:
                # Gemma4RMSNorm with with_scale=False: no weight.
                v = divide_by_rms(v.astype(jnp.float32), self.epsilon).astype(v.dtype)
        else:
            cache = inputs.kept[self.mixer.takes]
        sinks = None if self.sinks is None else self.sinks.get_value()
        attended, cache = inputs.attend(q, k, v, self.mixer, sinks, cache, call)
        y = merge_heads(attended)
        return self.o(y if gate is None else y * jax.nn.sigmoid(gate), call), cache

    def _with_rope(
        self, x: Float[Array, "b s hd"], axis: str | None, norm: NormLayer | None, rotation: Rotation | None
    ) -> Float[Array, "b s h d"]:
        """Return queries or keys by head, normalised and rotated."""
        late = self.mixer.qk_norm == "rotated"
        x = self._by_head(x, axis, None if late else norm)
        if self.mixer.rope is not None and rotation is not None:
            x = rotate(x, self.mixer.rope, rotation)
        return norm(x) if late and norm is not None else x

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
