"""The gated feed-forward layer (SwiGLU, Shazeer 2020)."""

from functools import partial

import jax
from flax import nnx
from jaxtyping import Array, Float

from jaxtune.models.call import Call
from jaxtune.models.linear import Linear, jointly
from jaxtune.models.spec import Gated, Layer, ModelSpec


class MLP(nnx.Module):
    """down(silu(gate(x)) * up(x)). `name` is its place in the layer."""

    def __init__(self, spec: ModelSpec, layer: Layer, gated: Gated, name: str = "mlp"):
        linear = partial(Linear, spec, layer, bias=gated.bias)
        self.gate = linear(f"{name}.gate", (gated.size, spec.hidden), ("mlp", "embed"))
        self.up = linear(f"{name}.up", (gated.size, spec.hidden), ("mlp", "embed"))
        self.down = linear(f"{name}.down", (spec.hidden, gated.size), ("embed", "mlp"))

    def __call__(self, x: Float[Array, "b s d"], call: Call) -> Float[Array, "b s d"]:
        """The feed-forward of every token."""
        gate, up = jointly([self.gate, self.up], x, call)
        return self.down(jax.nn.silu(gate) * up, call)
