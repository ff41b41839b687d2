"""A layer of a model, and a stack of layers that is scanned.

Shape letters: b rows of the batch, s positions in a row, d features of the residual stream, n repeats of a stack's
period.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from jaxtune.models.cache_slot import CacheSlot
from jaxtune.models.declared import declare_parameter
from jaxtune.models.forward_options import ForwardOptions, Remat
from jaxtune.models.layers.attention import Attention, Inputs
from jaxtune.models.layers.delta_net import GatedDeltaNet
from jaxtune.models.layers.latent_attention import LatentAttention
from jaxtune.models.layers.layer_embedding import EmbeddingGate
from jaxtune.models.layers.linear import EXPERT_PRODUCT, FFN_PRODUCT, PRODUCT, QKV_PRODUCT, Linear, scale
from jaxtune.models.layers.mamba2 import Mamba2Mixer
from jaxtune.models.layers.mlp import MLP
from jaxtune.models.layers.norm import NormLayer
from jaxtune.models.layers.short_conv import GatedShortConv
from jaxtune.models.mixture.experts import ExpertsLayer
from jaxtune.models.structure.layer_spec import Experts, FeedForward, Layer
from jaxtune.models.structure.mixers import DeltaNet, Heads, Hybrid, Mamba2, ShortConv
from jaxtune.models.structure.model_spec import ModelSpec
from jaxtune.models.structure.stack_spec import StackSpec
from jaxtune.parallel.layout import GATHERED, P, by_residual, by_token, reduce_early, shards
from jaxtune.parallel.offload import copy_to_device
from jaxtune.parallel.random import dropout
from jaxtune.precision.matmul import MAXIMA
from pallas_kernels import flash_attention, gated_delta_rule, mamba2_scan

# Names of the activations of a layer that are saved for the backward pass, in addition to its input; the rest is
# recomputed. 'none' recomputes only elementwise results (norms, rotation, SwiGLU, dropout), because saving them too
# took several times the memory, and recurrences that run in XLA. Each amax is saved because it is a scalar, while
# recomputing it needs the input again and an all-reduce.
MIXER_RESIDUALS = (flash_attention.RESIDUALS, gated_delta_rule.RESIDUALS, mamba2_scan.RESIDUALS)
SAVED_NAMES: dict[Remat, tuple[str, ...]] = {
    "none": (PRODUCT, QKV_PRODUCT, FFN_PRODUCT, EXPERT_PRODUCT, *MIXER_RESIDUALS, MAXIMA),
    "experts": (PRODUCT, QKV_PRODUCT, FFN_PRODUCT, *MIXER_RESIDUALS, MAXIMA),
    "ffn": (PRODUCT, QKV_PRODUCT, *MIXER_RESIDUALS, MAXIMA),
    "qkv": (PRODUCT, FFN_PRODUCT, EXPERT_PRODUCT, *MIXER_RESIDUALS, MAXIMA),
    "dots": (PRODUCT, QKV_PRODUCT, FFN_PRODUCT, EXPERT_PRODUCT, MAXIMA),
    "attention+qkv": (PRODUCT, FFN_PRODUCT, EXPERT_PRODUCT, MAXIMA),
    "block": (MAXIMA,),
    "offload": (MAXIMA,),  # and the layer's input, in host memory
}
INPUT = "input"  # the name of a layer's input
# Values that layers return in addition to activations: sums over the tokens of each row, (emitting layers, rows, ...);
# and what they record of each token.
Sums = dict[str, Array]


class Block(nnx.Module):
    """One transformer layer: a mixer, a feed-forward, or both."""

    def __init__(self, spec: ModelSpec, layer: Layer):
        def norm(slot: Any, *places: str) -> NormLayer | None:
            return NormLayer(spec.hidden, spec.norm) if slot is not None and layer.norms in places else None

        slot = layer.feed_forward
        self.attention_norm = norm(layer.mixer, "before", "both", "shared")
        mixers = {type(mixer): mixer for mixer in layer.mixers}

        def module(kind: type, of: Callable[..., Any]) -> Any:
            return of(spec, layer, mixers[kind]) if kind in mixers else None

        self.attention = module(Heads, _attention)
        self.delta_net = module(DeltaNet, GatedDeltaNet)
        self.mamba = module(Mamba2, Mamba2Mixer)
        self.short_conv = module(ShortConv, GatedShortConv)
        self.attention_out_norm = norm(layer.mixer, "after", "both")
        self.mlp_norm = norm(slot, "before", "both")
        self.mlp = _feed_forward(spec, layer, slot)
        self.mlp_out_norm = norm(slot, "after", "both")
        activation = slot.activation if slot is not None and spec.layer_embedding else None
        self.embedding_gate = None if activation is None else EmbeddingGate(spec, layer, activation)
        self.embedding_out_norm = None if activation is None else NormLayer(spec.hidden, spec.norm)
        self.scale = declare_parameter((1,), (None,), nnx.initializers.ones, "constant") if layer.scaled else None
        self.layer = layer

    def __call__(
        self, x: Float[Array, "b s d"], inputs: Inputs, cache: CacheSlot | None, call: ForwardOptions
    ) -> tuple[Float[Array, "b s d"], Any, Sums]:
        """Return the activations after the layer, its cache, and the sums of its experts (without a layer axis).

        In decoding it returns the cache of all repeats of the layer.
        """
        # Between mixer and feed-forward, x may also be sharded by position over the tensor axis (Rules.residual). The
        # reshard before each is then an all-gather, and the one in _add a reduce-scatter.
        normed, sums = x, {}
        if self.layer.mixer is not None:
            normed = _apply_norm(x, self.attention_norm)
            y, cache = self._mix(normed, inputs, cache, call)
            x = self._add(x, y, self.attention_out_norm, call, "mixer")
        if self.mlp is not None:
            if self.layer.norms != "shared":  # "shared": the feed-forward takes the mixer's normed input (Cohere)
                normed = _apply_norm(x, self.mlp_norm)
            normed, mlp = _reduce_module_early(normed, self.mlp)
            normed = jax.reshard(normed, by_token(None))
            if isinstance(mlp, MLP):
                y = mlp(normed, call)
            else:
                y, sums = mlp(normed, call, inputs.valid, x, inputs.routed_experts, inputs.visual)
            x = self._add(x, y, self.mlp_out_norm, call, "feed-forward")
        if self.embedding_gate is not None and inputs.layer_embeddings is not None:
            y = self.embedding_gate(jax.reshard(x, by_token(None)), inputs.layer_embeddings, call)
            x = self._add(x, y, self.embedding_out_norm, call, "embedding")
        if self.scale is not None:
            x *= jax.reshard(self.scale.get_value().astype(x.dtype), P(None))
        return x, cache, sums

    def _mix(
        self, x: Float[Array, "b s d"], inputs: Inputs, cache: CacheSlot | None, call: ForwardOptions
    ) -> tuple[Float[Array, "b s d"], Any]:
        """Return the output of the layer's mixer, or the sum of two, and the cache; a cache of two is a pair."""
        x, attention = _reduce_module_early(x, self.attention)
        x, recurrent = _reduce_module_early(x, self.delta_net or self.mamba or self.short_conv)
        x, hybrid = jax.reshard(x, by_token(None)), self.layer.mixer
        if not isinstance(hybrid, Hybrid):
            if recurrent is None:
                return attention(x, inputs, cache, call)
            y, memory = recurrent(x, inputs, cache and cache.read(), call)
            return y, cache and cache.write(memory)
        (into, out), (into_mamba, out_mamba) = hybrid.attention_factors, hybrid.mamba_factors
        of_attention, of_mamba = (None, None) if cache is None else (cache.part(0), cache.part(1))
        y, keys_and_values = attention(scale(x, into), inputs, of_attention, call)
        z, memory = recurrent(scale(x, into_mamba), inputs, of_mamba and of_mamba.read(), call)
        memory = of_mamba and of_mamba.write(memory)
        return scale(z, out_mamba) + scale(y, out), (keys_and_values, memory)

    def _add(self, x: Array, y: Array, norm: NormLayer | None, call: ForwardOptions, name: str) -> Array:
        y = _apply_norm(jax.reshard(y, by_residual()), norm)
        if call.noise is not None and call.hidden_dropout:
            y = dropout(y, call.noise.rate(call.hidden_dropout), call.noise.site(f"{name} dropout"))
        return x + scale(y, self.layer.residual_scale)


class Predictor(Block):
    """A multi-token-prediction module (DeepSeek-V3, arXiv:2412.19437, section 2.2): a layer after the body.

    h' = layer(W [norm(embedding); norm(h)]) and its norm are equations 21 and 22; embedding and head are the body's.
    The embedding is the first half of W's input, as in vLLM (qwen3_next_mtp.py, deepseek_mtp.py: `cat([inputs_embeds,
    hidden_states])`); the paper writes h first. h has passed the body's last norm, or that of the module before, as in
    vLLM and SGLang; the paper does not say. For DeepSeek, GLM and ERNIE, vLLM sets the embedding at position 0 to zero,
    which neither the paper nor this does.
    """

    def __init__(self, spec: ModelSpec, layer: Layer):
        super().__init__(spec, layer)
        self.embedding_norm = NormLayer(spec.hidden, spec.norm)
        self.hidden_norm = NormLayer(spec.hidden, spec.norm)
        # Its output is sharded as in a feed-forward, because no other dimension could be over the tensor axis.
        self.projection = Linear(spec, layer, "projection", (spec.hidden, 2 * spec.hidden), ("mlp", "embed"))
        self.output_norm = NormLayer(spec.hidden, spec.norm) if layer.output_norm else None

    def __call__(
        self, x: tuple[Float[Array, "b s d"], Float[Array, "b s d"]], inputs: Inputs, cache: Any, call: ForwardOptions
    ) -> tuple[tuple[Float[Array, "b s d"], Float[Array, "b s d"]], Any, Sums]:
        """Return ((the head's input, embedding), the layer's cache, its sums), from (hidden states, embedding).

        Without an output norm the first is not normalised yet: `Decoder.predict_further` applies the body's.
        """
        hidden, embedding = x
        both = jnp.concatenate([self.embedding_norm(embedding), self.hidden_norm(hidden)], axis=-1)
        # (b, s, 2 d) -> (b, s, d), equation 21.
        y = jax.reshard(self.projection(both, call), by_residual())
        y, cache, sums = super().__call__(y, inputs, cache, call)
        return (jax.reshard(_apply_norm(y, self.output_norm), by_token(None)), embedding), cache, sums


def _attention(spec: ModelSpec, layer: Layer, heads: Heads) -> Attention | LatentAttention:
    latent = heads.latent
    return Attention(spec, layer, heads) if latent is None else LatentAttention(spec, layer, heads, latent)


def _feed_forward(spec: ModelSpec, layer: Layer, slot: FeedForward | Experts | None) -> MLP | ExpertsLayer | None:
    match slot:
        case FeedForward():
            return MLP(spec, layer, slot)
        case Experts():
            return ExpertsLayer(spec, layer, slot)
    return None


def _reduce_module_early(x: Array, module: Any) -> tuple[Array, Any]:
    """`layout.reduce_early` with the weights of a module, without its adapters, whose gradients are small.

    With tensor parallelism nothing changes: there, products of weights' gradients hide the reduce-scatters of x's.
    """
    if module is None or shards(("tensor",), jax.sharding.get_abstract_mesh()) > 1:
        return x, module
    graph, adapters, weights = nnx.split(module, nnx.LoRAParam, ...)
    x, weights = reduce_early(x, weights)
    return x, nnx.merge(graph, adapters, weights)


def _apply_norm(x: Array, norm: NormLayer | None) -> Array:
    return x if norm is None else norm(x)


def make_block(spec: ModelSpec, layer: Layer) -> Block:
    """Return the module of a layer of the model."""
    return (Predictor if layer.predictor else Block)(spec.around(layer), layer)


class Stack(nnx.Module):
    """A repeated period of layers: each parameter has a leading axis of `repeats`, which is scanned."""

    def __init__(self, spec: ModelSpec, stack: StackSpec):
        self.blocks = nnx.List([make_block(spec, layer) for layer in stack.period])
        self.stack = stack
        self.float32 = any(treatment.float32 for layer in stack.period for _, treatment in layer.treatments)

    @jax.named_scope("layers")
    def __call__(
        self,
        x: Any,
        inputs: Inputs,
        cache: Any,
        call: ForwardOptions,
        numbers: Int[Array, " n"] | None = None,
    ) -> tuple[Any, Any, Sums]:
        """Return the activations after the stack, (b, s, d) or those of a `Predictor`, its cache and its sums.

        The cache has a tuple entry per layer of the period, whose leaves have a leading axis of `repeats`; without one,
        only layers that keep keys and values for later ones return any. numbers: the layer number of the first layer of
        each repeat; None: the whole stack's.
        """
        numbers = jnp.array(self.stack.layer_numbers(0)) if numbers is None else numbers
        mixtures = self.stack.mixtures
        # The arrays are split from the modules for the scan, so that a period is traced and compiled once, for any
        # number of repeats. Each iteration merges its slice of the weights back into the modules.
        graph, adapters, weights = nnx.split(self.blocks, nnx.LoRAParam, ...)
        if not self.float32:
            adapters = jax.tree.map(lambda a: a.astype(call.dtype), adapters)  # once, not in each layer of each pass

        # A loop updates what it carries in place. Scanned over, the cache would be copied for every token.
        def repeat(carried, scanned):
            x, caches = carried
            adapters, weights, number, place, embeddings, routed = scanned
            weights = copy_to_device(weights)  # from host memory, if they are offloaded
            x = checkpoint_name(x, INPUT)
            after, sums = [], []
            for position, block in enumerate(nnx.merge(graph, adapters, weights)):
                of_layer = inputs._replace(
                    layer_embeddings=None if embeddings is None else embeddings[position],
                    routed_experts=None if routed is None else dict(zip(mixtures, routed)).get(position),
                )
                stacked = caches and caches[position]
                slot = None if stacked is None else CacheSlot(stacked, place)
                x, layer_cache, emitted = block(x, of_layer, slot, call.layer(number + position))
                after.append(layer_cache)
                sums.append(emitted)
            after, sums = tuple(after), join_sums(sums, jnp.stack)
            return ((x, None), (after, sums)) if caches is None else ((x, after), (None, sums))

        policy = jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[*SAVED_NAMES[call.remat], *[GATHERED] * call.keep_gathered],
            names_which_can_be_offloaded=[INPUT] if call.remat == "offload" else [],
            offload_src="device",
            offload_dst="pinned_host",
        )
        # In a loop XLA cannot merge the recomputation with the forward pass, and the barriers of prevent_cse would only
        # hinder fusion. Without a loop they are needed, except with 'none': it recomputes only elementwise results,
        # and there merging saves time.
        prevent_cse = call.unroll and call.remat != "none"
        repeat = jax.checkpoint(repeat, policy=policy, prevent_cse=prevent_cse)
        unroll = len(numbers) if call.unroll else 1
        places = None if cache is None else jnp.arange(len(numbers))
        by_repeat = self._by_repeat(inputs.layer_embeddings), inputs.routed_experts
        scanned = (adapters, weights, numbers, places, *by_repeat)
        (x, caches), (kept, sums) = jax.lax.scan(repeat, (x, cache), scanned, unroll=unroll)
        return x, kept if cache is None else caches, {name: _by_layer(value) for name, value in sums.items()}

    def _by_repeat(self, embeddings: Float[Array, "l b s f"] | None) -> Float[Array, "repeats period b s f"] | None:
        if embeddings is None:
            return None
        first, length = self.stack.first, len(self.stack.period)
        part = embeddings[first : first + self.stack.repeats * length]  # (layers of the stack, b, s, f)
        out = P(None, *jax.typeof(part).sharding.spec)
        return jnp.reshape(part, (self.stack.repeats, length, *part.shape[1:]), out_sharding=out)

    def caches_for_later(self, cache: Any) -> dict[str, Any]:
        """Return the caches that layers keep for later ones (`Heads.keeps`), by name; `cache`: of all layers."""
        of_layers = zip([layer.mixer for layer in self.stack.period], cache, strict=True)
        named = {mixer.keeps: one for mixer, one in of_layers if isinstance(mixer, Heads) and mixer.keeps is not None}
        return {name: jax.tree.map(lambda leaf: leaf[-1], one) for name, one in named.items()}


def join_sums(sums: list[Sums], join: Callable[[list[Array]], Array]) -> Sums:
    """Join the sums of consecutive layers, which may have different names."""
    names = dict.fromkeys(name for emitted in sums for name in emitted)
    return {name: join([emitted[name] for emitted in sums if name in emitted]) for name in names}


def _by_layer(value: Float[Array, "repeats period ..."]) -> Float[Array, "layers ..."]:
    # Repeats of the period are the outer axis of the scan, so (repeats, period) flattens to the order of layers.
    out = P(None, *jax.typeof(value).sharding.spec[2:])
    return jnp.reshape(value, (-1, *value.shape[2:]), out_sharding=out)
