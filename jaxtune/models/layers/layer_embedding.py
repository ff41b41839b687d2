"""Embeddings for each layer (Gemma 4 E2B and E4B): a second table of tokens, whose features each layer gates and adds.

As `project_per_layer_inputs` and Gemma4TextDecoderLayer of transformers.

Shape letters: b rows of the batch, s positions in a row, d features of the residual stream, l layers, f features of an
embedding for one layer.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxtune.models.declared import declare_parameter
from jaxtune.models.forward_options import ForwardOptions
from jaxtune.models.layers.linear import Linear, scale
from jaxtune.models.layers.lookup import lookup_in_parts
from jaxtune.models.layers.mlp import ACTIVATIONS
from jaxtune.models.layers.norm import NormLayer
from jaxtune.models.structure.layer_spec import Activation, Layer
from jaxtune.models.structure.model_spec import ModelSpec
from jaxtune.parallel.layout import by_token


class LayerEmbeddings(nnx.Module):
    """The table of all layers' embeddings, and a projection of the model's own embeddings that is added to them."""

    def __init__(self, spec: ModelSpec):
        self.features, self.layers = spec.layer_embedding, len(spec.layers)
        width, init = self.layers * self.features, nnx.initializers.normal(spec.initializer_range)
        self.weight = declare_parameter((spec.padded_vocabulary, width), ("vocabulary", "embed"), init, "table")
        shape = (width, spec.hidden)
        self.projection = Linear(spec, spec, "layer_embeddings.projection", shape, ("mlp", "embed"))
        self.norm = NormLayer(self.features, spec.norm)

    @jax.named_scope("embedding")
    def __call__(
        self,
        tokens: Int[Array, "b s"],
        x: Float[Array, "b s d"],
        call: ForwardOptions,
        untrained: Bool[Array, "b s"] | None = None,
    ) -> Float[Array, "l b s f"]:
        """Return the tokens' embeddings for each layer, in the dtype of x, the first layer's input.

        untrained: tokens that do not train the table, because they are images: these have the embeddings of the padding
        token, which get no gradient in transformers (`padding_idx`). None: all train it.
        """
        own = lookup_in_parts(self.weight.astype(x.dtype), tokens)
        if untrained is not None:
            own = jnp.where(untrained[..., None], jax.lax.stop_gradient(own), own)
        own *= jnp.asarray(self.features**0.5, x.dtype)  # embed_scale of transformers
        # per_layer_model_projection_scale and, below, per_layer_input_scale of transformers.
        projected = scale(self.projection(jax.reshard(x, by_token(None)), call), x.shape[-1] ** -0.5)
        both = scale(self.norm(self._by_layer(projected)) + self._by_layer(own), 2**-0.5)
        return jnp.moveaxis(both, 2, 0)  # (b, s, l, f) -> (l, b, s, f): layers are scanned

    def _by_layer(self, x: Float[Array, "b s lf"]) -> Float[Array, "b s l f"]:
        whole = jax.reshard(x, by_token(None))
        return jnp.reshape(whole, (*x.shape[:2], self.layers, self.features), out_sharding=by_token(None, None))


class EmbeddingGate(nnx.Module):
    """Inside a layer: up(activation(down(x)) * embedding), with the layer's embedding of each token."""

    def __init__(self, spec: ModelSpec, layer: Layer, activation: Activation):
        features = spec.layer_embedding
        self.down = Linear(spec, layer, "embedding_gate.down", (features, spec.hidden), ("mlp", "embed"))
        self.up = Linear(spec, layer, "embedding_gate.up", (spec.hidden, features), ("embed", "mlp"))
        self.activation: Activation = activation

    @jax.named_scope("embedding gate")
    def __call__(
        self, x: Float[Array, "b s d"], embedding: Float[Array, "b s f"], call: ForwardOptions
    ) -> Float[Array, "b s d"]:
        """Return what the layer adds to its residual stream, before its norm."""
        gate = ACTIVATIONS[self.activation](self.down(x, call))
        return self.up(gate * jax.reshard(embedding, by_token("mlp")), call)
