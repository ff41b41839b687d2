"""The decoder: embedding, a tuple of scanned stacks of layers, final norm, head.

Modules only declare parameters (shapes, layout) and the forward pass. The values are a flat dict of arrays
(`parameters.py`); inside a pure function, `bind` puts them into the modules.

Shape letters: b rows of the batch, s positions in a row, d features of the residual stream, v rows of the head (the
padded vocabulary, or labels), n repeats of a stack's period, l layers, f features of an embedding for one layer.
"""

from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxtune.models.declared import declare_parameter
from jaxtune.models.forward_options import ForwardOptions
from jaxtune.models.layers.attention import Attend, Inputs
from jaxtune.models.layers.layer_embedding import LayerEmbeddings
from jaxtune.models.layers.linear import scale
from jaxtune.models.layers.lookup import lookup
from jaxtune.models.layers.norm import NormLayer
from jaxtune.models.layers.rope import rotation
from jaxtune.models.stack import Stack, Sums, join_sums
from jaxtune.models.structure.mixers import Heads
from jaxtune.models.structure.model_spec import ModelSpec
from jaxtune.models.structure.stack_spec import StackSpec
from jaxtune.models.vision.image_tokens import ImageTokens
from jaxtune.models.vision.tower import Tower
from jaxtune.parallel.layout import P, by_residual, by_token
from jaxtune.parallel.random import neftune

Parameters = dict[str, Any]


class Embedding(nnx.Module):
    """The token embedding, a row for each token; padding rows are never looked up."""

    def __init__(self, spec: ModelSpec):
        shape = (spec.padded_vocabulary, spec.hidden)
        self.weight = declare_parameter(
            shape, ("vocabulary", "embed"), nnx.initializers.normal(spec.initializer_range), "table"
        )

    def __call__(self, tokens: Int[Array, "b s"], dtype: jnp.dtype) -> Float[Array, "b s d"]:
        """Return the embeddings of tokens, in the compute dtype of the layers."""
        # Cast before the reshard, which all-gathers the table: `lookup` needs all of its rows on every device.
        return lookup(jax.reshard(self.weight.astype(dtype), P(None, None)), tokens)


class ClassifierHead(nnx.Module):
    """The head of a classifier, with a row for each label; `score.weight` in a Hugging Face folder."""

    def __init__(self, spec: ModelSpec):
        init = nnx.initializers.normal(spec.initializer_range)
        self.weight = declare_parameter((spec.labels, spec.hidden), (None, "embed"), init, "score")


class Decoder(nnx.Module):
    """A language model or a classifier; the forward pass ends at the hidden states, before the head."""

    def __init__(self, spec: ModelSpec):
        self.spec = spec
        self.embed = Embedding(spec)
        self.layer_embeddings = LayerEmbeddings(spec) if spec.layer_embedding else None
        self.stacks = nnx.List([Stack(spec, stack) for stack in spec.stacks])
        self.norm = NormLayer(spec.hidden, spec.norm)
        self.vision = None if spec.vision is None else Tower(spec)
        self.head = ClassifierHead(spec) if spec.labels else None if spec.tied else Embedding(spec)
        # Each in a stack of its own, because the output of one is the input of the next.
        first = len(spec.layers)
        self.mtp = nnx.List(
            [Stack(spec, StackSpec(number, (layer,), 1)) for number, layer in enumerate(spec.mtp, first)]
        )

    @property
    def head_weight(self) -> Float[Array, "v d"]:
        """The head's weight, or the embedding's if they are tied; a language model's has padding rows at the end."""
        return (self.embed if self.head is None else self.head).weight

    @property
    def pipeline(self) -> int | None:
        """The number of the stack that is pipelined, or None."""
        return next((number for number, one in enumerate(self.stacks) if one.stack.stages > 1), None)

    def run(
        self,
        x: Float[Array, "b s d"],
        inputs: Inputs,
        call: ForwardOptions,
        cache: Any = None,
        part: slice = slice(None),
    ) -> tuple[Float[Array, "b s d"], Any, Sums]:
        """Return the activations after the stacks in `part`, their caches and their sums."""
        after, sums, routed = [], [], inputs.routed_experts
        for number in range(len(self.stacks))[part]:
            inputs = inputs._replace(routed_experts=None if routed is None else routed[number])
            x, stack_cache, emitted = self.stacks[number](x, inputs, cache and cache[number], call)
            inputs = inputs._replace(kept={**inputs.kept, **self.stacks[number].caches_for_later(stack_cache)})
            if inputs.images is not None:
                x = inputs.images.add(x, self.stacks[number].stack.end - 1)
            after.append(stack_cache)
            sums.append(emitted)
        return x, (tuple(after) if cache else None), join_sums(sums, jnp.concatenate)

    def __call__(
        self, tokens: Int[Array, "b s"], inputs: Inputs, call: ForwardOptions, cache: Any = None
    ) -> tuple[Float[Array, "b s d"], Any, Sums]:
        """Return the hidden states for the head, the updated cache, and the sums of all layers."""
        x = self.embed_tokens(tokens, call)
        if inputs.images is not None:
            x = inputs.images.replace(x)
        if self.layer_embeddings is not None:
            inputs = inputs._replace(layer_embeddings=self._embed_for_layers(tokens, x, inputs.images, call))
        x, cache, sums = self.run(x, inputs._replace(visual=self._find_visual(tokens)), call, cache)
        return self.apply_final_norm(x), cache, sums

    def _find_visual(self, tokens: Int[Array, "b s"]) -> Bool[Array, "b s"] | None:
        """Return whether each token is visual; None: no token of the vocabulary is.

        So are such tokens that a model generates, as in training on them; transformers' `generate` takes them for text.
        """
        numbers = () if self.spec.vision is None else self.spec.vision.visual_tokens
        return reduce(jnp.logical_or, (tokens == number for number in numbers)) if numbers else None

    def _embed_for_layers(
        self, tokens: Int[Array, "b s"], x: Float[Array, "b s d"], images: ImageTokens | None, call: ForwardOptions
    ) -> Float[Array, "l b s f"]:
        """Return the embeddings for each layer; an image token has the embeddings of `layer_embedding_token`."""
        assert self.layer_embeddings is not None
        if images is None or self.spec.vision is None:
            return self.layer_embeddings(tokens, x, call)
        is_image = jax.reshard(images.place >= 0, by_token())
        tokens = jnp.where(is_image, self.spec.vision.layer_embedding_token, tokens)
        return self.layer_embeddings(tokens, x, call, is_image)

    @jax.named_scope("mtp")
    def predict_further(
        self,
        module: int,
        hidden: Float[Array, "b s d"],
        tokens: Int[Array, "b s"],
        inputs: Inputs,
        call: ForwardOptions,
    ) -> tuple[Float[Array, "b s d"], Sums]:
        """Return the head's input of a multi-token-prediction module, and the sums of its layer.

        hidden: the head's input of the body, or of the module before. tokens: at each position, the last token that the
        module sees; its output predicts the one after. What they are after a document's end reaches no target, because
        attention is causal.
        """
        embedding = jax.reshard(self.embed_tokens(tokens, call._replace(noise=None)), by_token(None))
        (hidden, _), _, sums = self.mtp[module]((hidden, embedding), inputs, None, call)
        return hidden if self.spec.mtp[module].output_norm else self.norm(hidden), sums

    @jax.named_scope("embedding")
    def embed_tokens(self, tokens: Int[Array, "b s"], call: ForwardOptions) -> Float[Array, "b s d"]:
        """Return the first layer's input: scaled embeddings, with NEFTune noise in training."""
        x = self.embed(tokens, call.dtype)
        if call.noise is not None and call.neftune_alpha:
            x = neftune(x, call.neftune_alpha, call.noise.site("embeddings"))
        if self.spec.embedding_scale != 1:
            x *= jnp.asarray(self.spec.embedding_scale, x.dtype)  # the factor is rounded too, as Gemma's is
        return jax.reshard(x, by_residual())

    def apply_final_norm(self, x: Float[Array, "b s d"]) -> Float[Array, "b s d"]:
        """Return the head's input from the last layer's output: normalised, and scaled if the spec scales logits."""
        return scale(jax.reshard(self.norm(x), by_token(None)), self.spec.logit_scale)


def inputs_of(
    spec: ModelSpec,
    positions: Int[Array, "b s"],
    attend: Attend,
    valid: Bool[Array, "b s"],
    place: Int[Array, "b s"] | None = None,
    rope_positions: Int[Array, "b s"] | Int[Array, "b s axes"] | None = None,
) -> Inputs:
    """Make the inputs that all layers of a decoder share; each rope is computed once.

    rope_positions: positions along each axis of the ropes, or one for all axes; None: they are `positions`.
    """
    mixers = dict.fromkeys(mixer for layer in spec.layers + spec.mtp for mixer in layer.mixers)
    heads = [mixer for mixer in mixers if isinstance(mixer, Heads)]
    ropes = dict.fromkeys((mixer.rope, mixer.rope_dim) for mixer in heads if mixer.rope is not None)
    turning = positions if rope_positions is None else rope_positions
    rotations = {(rope, width): rotation(rope, width, turning) for rope, width in ropes}
    return Inputs(rotations, attend, positions, valid, place)


def routed_by_stack(spec: ModelSpec, routed: Int[Array, "b s w"]) -> tuple[Int[Array, "repeats m b s k"] | None, ...]:
    """Return the column `routed_experts` as `Inputs` has it."""
    layout = jax.typeof(routed).sharding.spec[:2]
    # (b, s, mixtures * k) -> (b, s, mixtures, k); below mixtures are the leading axis.
    whole = jnp.reshape(routed, (*routed.shape[:2], *spec.routed_shape), out_sharding=P(*layout))
    by_layer, parts, first = jnp.moveaxis(whole, 2, 0), [], 0
    for stack in spec.stacks:
        count = stack.repeats * len(stack.mixtures)
        part, first = by_layer[first : first + count], first + count
        shape = (stack.repeats, len(stack.mixtures), *part.shape[1:])
        parts.append(jnp.reshape(part, shape, out_sharding=P(None, None, *layout)) if count else None)
    return tuple(parts)


def bind(graph: nnx.GraphDef, parameters: Parameters) -> Any:
    """Return the decoder, or a submodule, with the given values in its parameters."""
    # "stacks.0.blocks.1.mlp.up.weight" -> ("stacks", 0, "blocks", 1, "mlp", "up", "weight").
    values: Any = {tuple(int(p) if p.isdigit() else p for p in name.split(".")): v for name, v in parameters.items()}
    return nnx.merge(graph, nnx.from_flat_state(values))


def cast_like(parameters: Parameters, like: Parameters) -> Parameters:
    """Copy the parameters in `like`, each cast to its dtype there."""
    return {name: jnp.copy(parameters[name].astype(other.dtype)) for name, other in like.items()}
