"""Multi-head latent attention (DeepSeek-V2, Liu et al. 2024): keys and values of all heads from one narrow latent.

Shape letters: b rows of the batch, s positions in a row, d features of the residual stream, h heads; "hd" is all heads'
features in one axis, one head after another.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxtune.models.forward_options import ForwardOptions
from jaxtune.models.layers.attention import Inputs
from jaxtune.models.layers.linear import Linear, run_linears
from jaxtune.models.layers.norm import NormLayer
from jaxtune.models.layers.rope import rotate
from jaxtune.models.structure.layer_spec import Layer
from jaxtune.models.structure.layer_spec import Norm as NormSpec
from jaxtune.models.structure.mixers import Heads, Latent
from jaxtune.models.structure.model_spec import ModelSpec
from jaxtune.parallel.layout import by_token

LATENT_NORM = NormSpec(1e-6)  # as in transformers, not the epsilon of the model's other norms


class LatentAttention(nnx.Module):
    """softmax(QK^T)V; rope rotates the last features of each query head, and all heads share one rotated key.

    Keys and values are expanded before attention, also in decoding: the cache has expanded heads, not latents.
    """

    def __init__(self, spec: ModelSpec, layer: Layer, heads: Heads, latent: Latent):
        self.heads, self.latent = heads, latent

        def linear(name: str, out: int, into: int, *axes: str | None) -> Linear:
            return Linear(spec, layer, f"attention.{name}", (out, into), axes, bias=name in heads.bias)

        queries = heads.heads * heads.head_dim
        if latent.query_rank is None:
            self.q = linear("q", queries, spec.hidden, "heads", "embed")
        else:
            # A latent is not sharded, because its norm needs all features.
            self.q_down = linear("q_down", latent.query_rank, spec.hidden, None, "embed")
            self.q_norm = NormLayer(latent.query_rank, LATENT_NORM)
            self.q_up = linear("q_up", queries, latent.query_rank, "heads", None)
        # kv_a_proj_with_mqa and kv_b_proj of transformers.
        self.kv_down = linear("kv_down", latent.rank + latent.rope_dim, spec.hidden, None, "embed")
        self.kv_norm = NormLayer(latent.rank, LATENT_NORM)
        expanded = heads.heads * (heads.head_dim - latent.rope_dim + latent.value_dim)
        self.kv_up = linear("kv_up", expanded, latent.rank, "heads", None)
        self.o = linear("o", spec.hidden, heads.heads * latent.value_dim, "embed", "heads")

    @jax.named_scope("attention")
    def __call__(
        self, x: Float[Array, "b s d"], inputs: Inputs, cache: Any, call: ForwardOptions
    ) -> tuple[Float[Array, "b s d"], Any]:
        """Return the layer's output and its updated cache."""
        latent, head_dim = self.latent, self.heads.head_dim
        if latent.query_rank is None:
            q, kv = run_linears([self.q, self.kv_down], x, call)
        else:
            q, kv = run_linears([self.q_down, self.kv_down], x, call)
            q = self.q_up(self.q_norm(q), call)
        # The last features of kv_down are the rotated key that all heads share. It has neither a norm nor an expansion.
        kv, key = jnp.split(kv, [latent.rank], axis=-1)
        kv = self.kv_up(self.kv_norm(kv), call)
        # kv_up's rows are, head by head, the key's features without rope and then the value's.
        q, kv, key = self._by_head(q), self._by_head(kv), key[:, :, None]  # key: (b, s, 1, rotated features)
        plain = head_dim - latent.rope_dim  # qk_nope_head_dim in config.json
        (q, q_rotated), (k, v) = (jnp.split(both, [plain], axis=-1) for both in (q, kv))
        query_scale = None
        if (rope := self.heads.rope) is not None:
            rotation = inputs.rotations[rope, latent.rope_dim]
            turn, query_scale = partial(rotate, rope=rope, rotation=rotation), rotation.query_scale
            q_rotated, key = turn(q_rotated), turn(key)
        key = jnp.broadcast_to(key, q_rotated.shape, out_sharding=by_token("heads", None))
        q, k = jnp.concatenate([q, q_rotated], axis=-1), jnp.concatenate([k, key], axis=-1)
        if query_scale is not None:
            q *= query_scale.astype(q.dtype)
        # Values are padded, because the kernels need keys and values of the same width.
        v = jnp.pad(v, [(0, 0)] * 3 + [(0, head_dim - latent.value_dim)])
        attended, cache = inputs.attend(q, k, v, self.heads, None, cache, call)
        attended = attended[..., : latent.value_dim]
        merged = jnp.reshape(attended, (*x.shape[:2], -1), out_sharding=by_token("heads"))
        return self.o(merged, call), cache

    def _by_head(self, x: Float[Array, "b s hd"]) -> Float[Array, "b s h d"]:
        return jnp.reshape(x, (*x.shape[:2], self.heads.heads, -1), out_sharding=by_token("heads", None))
