"""The gated feed-forward layer (SwiGLU, Shazeer 2020)."""

from functools import partial

import jax
from flax import nnx
from jaxtyping import Array, Float

from jaxtune.models.dropout import Noise
from jaxtune.models.linear import Linear
from jaxtune.models.spec import Layer, ModelSpec


class MLP(nnx.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, spec: ModelSpec, layer: Layer):
        linear = partial(Linear, spec, layer, bias=spec.mlp_bias)
        self.gate = linear("mlp.gate", (spec.intermediate, spec.hidden), ("mlp", "embed"))
        self.up = linear("mlp.up", (spec.intermediate, spec.hidden), ("mlp", "embed"))
        self.down = linear("mlp.down", (spec.hidden, spec.intermediate), ("embed", "mlp"))

    def __call__(self, x: Float[Array, "b s d"], noise: Noise | None) -> Float[Array, "b s d"]:
        """The feed-forward of every token."""
        return self.down(jax.nn.silu(self.gate(x, noise)) * self.up(x, noise), noise)
