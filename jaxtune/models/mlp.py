"""The gated feed-forward layer (SwiGLU, Shazeer 2020)."""

import jax
from flax import nnx
from jaxtyping import Array, Float

from jaxtune.models.dropout import Noise
from jaxtune.models.linear import Linear
from jaxtune.models.spec import Layer, ModelSpec


class MLP(nnx.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, spec: ModelSpec, layer: Layer):
        def linear(name: str, shape: tuple[int, int], axes: tuple[str, str]) -> Linear:
            site = f"mlp.{name}"
            adapter = spec.adapter if site in layer.adapters else None
            return Linear(site, shape, axes, bias=spec.mlp_bias, std=spec.initializer_range, adapter=adapter)

        self.gate = linear("gate", (spec.intermediate, spec.hidden), ("mlp", "embed"))
        self.up = linear("up", (spec.intermediate, spec.hidden), ("mlp", "embed"))
        self.down = linear("down", (spec.hidden, spec.intermediate), ("embed", "mlp"))

    def __call__(self, x: Float[Array, "b s d"], noise: Noise | None) -> Float[Array, "b s d"]:
        """The feed-forward of every token."""
        return self.down(jax.nn.silu(self.gate(x, noise)) * self.up(x, noise), noise)
