"""The decoder: embedding, a tuple of scanned stacks of layers, final norm, head.

Modules declare (shapes, layout, forward pass); the values are a flat dict of arrays, `parameters.py`, that `bind`
puts in their place inside a pure function.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from jaxtune.models.declared import declared
from jaxtune.models.forward_options import Call, Remat
from jaxtune.models.layers.attention import Attend, Attention, Inputs
from jaxtune.models.layers.delta_net import GatedDeltaNet
from jaxtune.models.layers.experts import Experts
from jaxtune.models.layers.latent_attention import LatentAttention
from jaxtune.models.layers.linear import EXPERT_PRODUCT, FFN_PRODUCT, PRODUCT, QKV_PRODUCT
from jaxtune.models.layers.lookup import lookup
from jaxtune.models.layers.mlp import MLP
from jaxtune.models.layers.norm import Norm
from jaxtune.models.layers.rope import rotation
from jaxtune.models.spec import DeltaNet, FeedForward, Heads, Layer, ModelSpec, StackSpec
from jaxtune.parallel.layout import GATHERED, P, by_residual, by_token
from jaxtune.parallel.offload import landed
from jaxtune.parallel.random import dropout, shaken
from jaxtune.precision.matmul import MAXIMA
from pallas_kernels import flash_attention, gated_delta_rule

# Activations of a layer that are saved for the backward pass, besides its input; the rest is recomputed. With 'none'
# only elementwise results are (norms, rotation, SwiGLU, dropout): saving them as well took several times the memory.
# Each amax is a scalar, but to recompute it takes the input again and an all-reduce.
MIXED = (flash_attention.RESIDUALS, gated_delta_rule.RESIDUALS)
KEPT: dict[Remat, tuple[str, ...]] = {
    "none": (PRODUCT, QKV_PRODUCT, FFN_PRODUCT, EXPERT_PRODUCT, *MIXED, MAXIMA),
    "experts": (PRODUCT, QKV_PRODUCT, FFN_PRODUCT, *MIXED, MAXIMA),
    "ffn": (PRODUCT, QKV_PRODUCT, *MIXED, MAXIMA),
    "qkv": (PRODUCT, FFN_PRODUCT, EXPERT_PRODUCT, *MIXED, MAXIMA),
    "dots": (PRODUCT, QKV_PRODUCT, FFN_PRODUCT, EXPERT_PRODUCT, MAXIMA),
    "attention+qkv": (PRODUCT, FFN_PRODUCT, EXPERT_PRODUCT, MAXIMA),
    "block": (MAXIMA,),
    "offload": (MAXIMA,),  # and the layer's input in the host's memory
}
INPUT = "input"  # the name of a layer's input
Parameters = dict[str, Any]
# What layers emit besides activations: sums over the tokens of each row, (layers that emit it, rows, ...).
Sums = dict[str, Array]


class Block(nnx.Module):
    """One transformer layer."""

    def __init__(self, spec: ModelSpec, layer: Layer):
        def norm(*places: str) -> Norm | None:
            return Norm(spec.hidden, spec.norm) if layer.norms in places else None

        self.attention_norm = norm("before", "both", "shared")
        mixer = layer.mixer
        self.attention = _attention(spec, layer, mixer) if isinstance(mixer, Heads) else None
        self.delta_net = GatedDeltaNet(spec, layer, mixer) if isinstance(mixer, DeltaNet) else None
        self.attention_out_norm = norm("after", "both")
        self.mlp_norm = norm("before", "both")
        slot = layer.feed_forward
        self.mlp = MLP(spec, layer, slot) if isinstance(slot, FeedForward) else Experts(spec, layer, slot)
        self.mlp_out_norm = norm("after", "both")
        self.layer = layer

    def __call__(
        self, x: Float[Array, "b s d"], inputs: Inputs, cache: Any, call: Call
    ) -> tuple[Float[Array, "b s d"], Any, Sums]:
        """Activations after the layer, its cache, and what its experts emit, without the axis of layers."""
        normed = jax.reshard(_normalized(x, self.attention_norm), by_token(None))
        mixer: Any = self.attention or self.delta_net  # one of them
        mixed, cache = mixer(normed, inputs, cache, call)
        x = self._added(x, mixed, self.attention_out_norm, call, "mixer")
        if self.layer.norms != "shared":
            normed = jax.reshard(_normalized(x, self.mlp_norm), by_token(None))
        fed, sums = (self.mlp(normed, call), {}) if isinstance(self.mlp, MLP) else self.mlp(normed, call, inputs.valid)
        return self._added(x, fed, self.mlp_out_norm, call, "feed-forward"), cache, sums

    def _added(self, x: Array, y: Array, norm: Norm | None, call: Call, name: str) -> Array:
        y = _normalized(jax.reshard(y, by_residual()), norm)
        if call.noise is not None and call.hidden_dropout:
            y = dropout(y, call.noise.rate(call.hidden_dropout), call.noise.site(f"{name} dropout"))
        return x + (y if self.layer.residual_scale == 1 else y * self.layer.residual_scale)


def _attention(spec: ModelSpec, layer: Layer, heads: Heads) -> Attention | LatentAttention:
    latent = heads.latent
    return Attention(spec, layer, heads) if latent is None else LatentAttention(spec, layer, heads, latent)


def _normalized(x: Array, norm: Norm | None) -> Array:
    return x if norm is None else norm(x)


class Stack(nnx.Module):
    """A period of layers, repeated: each parameter of a layer has a leading axis of `repeats`, which is scanned."""

    def __init__(self, spec: ModelSpec, stack: StackSpec):
        self.blocks = nnx.List([Block(spec, layer) for layer in stack.period])
        self.stack = stack
        self.float32 = any(treatment.float32 for layer in stack.period for _, treatment in layer.treatments)

    def __call__(
        self, x: Float[Array, "b s d"], inputs: Inputs, cache: Any, call: Call, numbers: Int[Array, " n"] | None = None
    ) -> tuple[Float[Array, "b s d"], Any, Sums]:
        """Activations after the stack, its cache (leaves with a leading axis of `repeats`, a tuple a period), sums.

        numbers: of the first layer of each repeat; None: those of the whole stack.
        """
        numbers = jnp.array(self.stack.layer_numbers(0)) if numbers is None else numbers
        # The scan takes the arrays apart from the modules: a period is traced and compiled once, whatever `repeats`,
        # and each iteration merges its slice of the weights with the modules again.
        graph, adapters, weights = nnx.split(self.blocks, nnx.LoRAParam, ...)
        if not self.float32:
            adapters = jax.tree.map(lambda a: a.astype(call.dtype), adapters)  # once, not in each layer of each pass

        def repeat(x, scanned):
            adapters, weights, cache, number = scanned
            weights = landed(weights)
            x = checkpoint_name(x, INPUT)
            after, sums = [], []
            for position, block in enumerate(nnx.merge(graph, adapters, weights)):
                x, layer_cache, emitted = block(x, inputs, cache and cache[position], call.layer(number + position))
                after.append(layer_cache)
                sums.append(emitted)
            return x, (tuple(after) if cache else None, joined(sums, jnp.stack))

        kept = jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[*KEPT[call.remat], *[GATHERED] * call.keep_gathered],
            names_which_can_be_offloaded=[INPUT] if call.remat == "offload" else [],
            offload_src="device",
            offload_dst="pinned_host",
        )
        # A loop keeps XLA from merging the recomputation with the forward pass: the barriers of prevent_cse would only
        # hinder fusion. Without a loop, and with nothing but elementwise results to recompute, merging saves time.
        apart = call.unroll and call.remat != "none"
        repeat = jax.checkpoint(repeat, policy=kept, prevent_cse=apart)
        unroll = len(numbers) if call.unroll else 1
        x, (cache, sums) = jax.lax.scan(repeat, x, (adapters, weights, cache, numbers), unroll=unroll)
        return x, cache, {name: _by_layer(value) for name, value in sums.items()}


def joined(sums: list[Sums], join: Callable[[list[Array]], Array]) -> Sums:
    """Those of layers that follow one another, each of which may emit other names."""
    names = dict.fromkeys(name for emitted in sums for name in emitted)
    return {name: join([emitted[name] for emitted in sums if name in emitted]) for name in names}


def _by_layer(value: Float[Array, "repeats period ..."]) -> Float[Array, "layers ..."]:
    out = P(None, *jax.typeof(value).sharding.spec[2:])
    return jnp.reshape(value, (-1, *value.shape[2:]), out_sharding=out)


class Embedding(nnx.Module):
    """Token vectors, one row each; padded rows are never looked up."""

    def __init__(self, spec: ModelSpec):
        shape = (spec.padded_vocabulary, spec.hidden)
        self.weight = declared(shape, ("vocabulary", "embed"), nnx.initializers.normal(spec.initializer_range), "table")

    def __call__(self, tokens: Int[Array, "b s"], dtype: jnp.dtype) -> Float[Array, "b s d"]:
        """Vectors of tokens, in the dtype that everything after computes in."""
        return lookup(jax.reshard(self.weight.astype(dtype), P(None, None)), tokens)


class Score(nnx.Module):
    """The head of a classifier, a row for each label."""

    def __init__(self, spec: ModelSpec):
        init = nnx.initializers.normal(spec.initializer_range)
        self.weight = declared((spec.labels, spec.hidden), (None, "embed"), init, "score")


class Decoder(nnx.Module):
    """A language model or a classifier, up to the hidden states that its head multiplies."""

    def __init__(self, spec: ModelSpec):
        self.spec = spec
        self.embed = Embedding(spec)
        self.stacks = nnx.List([Stack(spec, stack) for stack in spec.stacks])
        self.norm = Norm(spec.hidden, spec.norm)
        self.head = Score(spec) if spec.labels else None if spec.tied else Embedding(spec)

    @property
    def head_weight(self) -> Float[Array, "v d"]:
        """The head, which may be the embedding; of a language model, rows past the vocabulary are padding."""
        return (self.embed if self.head is None else self.head).weight

    @property
    def pipeline(self) -> int | None:
        """The number of the stack that is one."""
        return next((number for number, one in enumerate(self.stacks) if one.stack.stages > 1), None)

    def run(
        self, x: Float[Array, "b s d"], inputs: Inputs, call: Call, cache: Any = None, part: slice = slice(None)
    ) -> tuple[Float[Array, "b s d"], Any, Sums]:
        """Activations after the stacks in `part`, their caches, and the sums that they emit."""
        after, sums = [], []
        for number in range(len(self.stacks))[part]:
            x, stack_cache, emitted = self.stacks[number](x, inputs, cache and cache[number], call)
            after.append(stack_cache)
            sums.append(emitted)
        return x, (tuple(after) if cache else None), joined(sums, jnp.concatenate)

    def __call__(
        self, tokens: Int[Array, "b s"], inputs: Inputs, call: Call, cache: Any = None
    ) -> tuple[Float[Array, "b s d"], Any, Sums]:
        """Hidden states for the head, the cache afterwards, and the sums that layers emit."""
        x, cache, sums = self.run(self.embedded(tokens, call), inputs, call, cache)
        return self.normed(x), cache, sums

    def embedded(self, tokens: Int[Array, "b s"], call: Call) -> Float[Array, "b s d"]:
        """What the first layer takes."""
        x = self.embed(tokens, call.dtype)
        if call.noise is not None and call.neftune_alpha:
            x = shaken(x, call.neftune_alpha, call.noise.site("embeddings"))
        if self.spec.embedding_scale != 1:
            x *= jnp.asarray(self.spec.embedding_scale, x.dtype)
        return jax.reshard(x, by_residual())

    def normed(self, x: Float[Array, "b s d"]) -> Float[Array, "b s d"]:
        """What the head multiplies, from what the last layer gives."""
        x = jax.reshard(self.norm(x), by_token(None))
        return x if self.spec.logit_scale == 1 else x * self.spec.logit_scale


def inputs_of(
    spec: ModelSpec,
    positions: Int[Array, "b s"],
    attend: Attend,
    valid: Bool[Array, "b s"],
    place: Int[Array, "b s"] | None = None,
) -> Inputs:
    """What every layer of a decoder sees; each rope is computed once."""
    mixers = dict.fromkeys(layer.mixer for layer in spec.layers if isinstance(layer.mixer, Heads))
    ropes = dict.fromkeys((mixer.rope, mixer.rotated) for mixer in mixers if mixer.rope is not None)
    rotations = {(rope, width): rotation(rope, width, positions) for rope, width in ropes}
    return Inputs(rotations, attend, positions, valid, place)


def bind(graph: nnx.GraphDef, parameters: Parameters) -> Any:
    """The decoder, or a part of it, with these values in place of what it declares."""
    values: Any = {tuple(int(p) if p.isdigit() else p for p in name.split(".")): v for name, v in parameters.items()}
    return nnx.merge(graph, nnx.from_flat_state(values))


def cast_like(parameters: Parameters, like: Parameters) -> Parameters:
    """Copies of the parameters that `like` names, in its dtypes."""
    return {name: jnp.copy(parameters[name].astype(other.dtype)) for name, other in like.items()}
