"""The decoder: embedding, a tuple of scanned stacks of layers, final norm, head.

Modules declare (shapes, layout, forward pass); the values are a flat dict of arrays, `parameters.py`, that `bind`
puts in their place inside a pure function.
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxtune.models.attention import Attend, Attention, Inputs
from jaxtune.models.declared import declared
from jaxtune.models.dropout import Noise
from jaxtune.models.linear import PRODUCT
from jaxtune.models.lookup import lookup
from jaxtune.models.mlp import MLP
from jaxtune.models.norm import RMSNorm
from jaxtune.models.rope import rotation
from jaxtune.models.spec import Layer, ModelSpec, StackSpec, stacks
from jaxtune.parallel.layout import P
from jaxtune.precision.matmul import MAXIMA
from pallas_kernels.flash_attention import RESIDUALS

Remat = Literal["none", "dots", "block"]
# What the backward pass finds of a layer besides its input; the rest it computes again. With 'none' that is only what
# is elementwise (norms, rotation, SwiGLU, dropout): kept as well, it took several times the memory.
# The largest magnitudes are a number each, and would need their input and a sum over devices again.
KEPT: dict[Remat, tuple[str, ...]] = {
    "none": (PRODUCT, RESIDUALS, MAXIMA),
    "dots": (PRODUCT, MAXIMA),
    "block": (MAXIMA,),
}
Parameters = dict[str, Any]


class Block(nnx.Module):
    """One pre-norm transformer layer."""

    def __init__(self, spec: ModelSpec, layer: Layer):
        self.attention_norm = RMSNorm(spec.hidden, spec.norm_epsilon)
        self.attention = Attention(spec, layer)
        self.mlp_norm = RMSNorm(spec.hidden, spec.norm_epsilon)
        self.mlp = MLP(spec, layer)

    def __call__(self, x: Float[Array, "b s d"], inputs: Inputs, cache: Any, noise: Noise | None):
        """Activations after the layer, and its cache."""
        attended, cache = self.attention(self.attention_norm(x), inputs, cache, noise)
        x = x + attended
        return x + self.mlp(self.mlp_norm(x), noise), cache


class Stack(nnx.Module):
    """A period of layers, repeated: each parameter of a layer has a leading axis of `repeats`, which is scanned."""

    def __init__(self, spec: ModelSpec, stack: StackSpec):
        self.blocks = nnx.List([Block(spec, layer) for layer in stack.period])
        self.first, self.repeats = stack.first, stack.repeats

    def __call__(self, x: Float[Array, "b s d"], inputs: Inputs, cache: Any, noise: Noise | None, remat: Remat):
        """Activations after the stack, and its cache (leaves with a leading axis of `repeats`, a tuple a period)."""
        graph, weights = nnx.split(self.blocks)
        period = len(self.blocks)

        def repeat(x, scanned):
            weights, cache, number = scanned
            after = []
            for position, block in enumerate(nnx.merge(graph, weights)):
                layer_noise = noise.layer(number + position) if noise is not None else None
                x, layer_cache = block(x, inputs, cache and cache[position], layer_noise)
                after.append(layer_cache)
            return x, (tuple(after) if cache else None)

        numbers = self.first + period * jnp.arange(self.repeats)
        kept = jax.checkpoint_policies.save_only_these_names(*KEPT[remat])
        repeat = jax.checkpoint(repeat, policy=kept, prevent_cse=False)
        return jax.lax.scan(repeat, x, (weights, cache, numbers))


class Embedding(nnx.Module):
    """Token vectors, one row each; padded rows are never looked up."""

    def __init__(self, spec: ModelSpec):
        shape = (spec.padded_vocabulary, spec.hidden)
        self.weight = declared(shape, ("vocabulary", "embed"), nnx.initializers.normal(spec.initializer_range))

    def __call__(self, tokens: Int[Array, "b s"], dtype: jnp.dtype) -> Float[Array, "b s d"]:
        """Vectors of tokens, in the dtype that everything after computes in."""
        return lookup(jax.reshard(self.weight.astype(dtype), P(None, None)), tokens)


class Decoder(nnx.Module):
    """A language model up to the hidden states that its head multiplies."""

    def __init__(self, spec: ModelSpec):
        self.spec = spec
        self.embed = Embedding(spec)
        self.stacks = nnx.List([Stack(spec, stack) for stack in stacks(spec.layers)])
        self.norm = RMSNorm(spec.hidden, spec.norm_epsilon)
        self.head = None if spec.tied else Embedding(spec)

    @property
    def head_weight(self) -> Float[Array, "v d"]:
        """The head, which may be the embedding; rows past the vocabulary are padding."""
        return (self.embed if self.head is None else self.head).weight

    def __call__(
        self,
        tokens: Int[Array, "b s"],
        positions: Int[Array, "b s"],
        attend: Attend,
        *,
        dtype: jnp.dtype,
        cache: Any = None,
        noise: Noise | None = None,
        remat: Remat = "none",
    ) -> tuple[Float[Array, "b s d"], Any]:
        """Hidden states after the final norm, computed in `dtype`, and the cache afterwards."""
        cos, sin = rotation(self.spec.rope, self.spec.head_dim, positions)
        inputs = Inputs(cos, sin, attend)
        x = self.embed(tokens, dtype)
        after = []
        for number, stack in enumerate(self.stacks):
            x, stack_cache = stack(x, inputs, cache and cache[number], noise, remat)
            after.append(stack_cache)
        return self.norm(x), (tuple(after) if cache else None)


def bind(graph: nnx.GraphDef, parameters: Parameters) -> Decoder:
    """The decoder with these values in place of what it declares."""
    values: Any = {tuple(int(p) if p.isdigit() else p for p in name.split(".")): v for name, v in parameters.items()}
    return nnx.merge(graph, nnx.from_flat_state(values))
