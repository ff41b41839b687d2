"""Learned factors of activations: (IA)^3 (Liu et al. 2022)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxtune.models.declared import declared
from jaxtune.models.forward_options import Call
from jaxtune.models.layers.linear import Linear


@dataclass(frozen=True)
class IA3:
    """A factor of each feature of a linear layer's output, or of its input: an `Adapter` of models.layers.linear."""

    of_input: bool
    owner: str | None = None

    peft_names: ClassVar[Mapping[str, str]] = {"ia3_l": "ia3_l"}
    shared: ClassVar[frozenset[str]] = frozenset()
    from_weight: ClassVar[bool] = False

    def declare(self, shape: tuple[int, int], axes: tuple[str | None, ...]) -> dict[str, Any]:
        """Ones, in the shape that peft has: (1, in) of the input, (out, 1) of the output."""
        out, inner = shape
        where = ((1, inner), (None, axes[1])) if self.of_input else ((out, 1), (axes[0], None))
        return {"ia3_l": declared(*where, nnx.initializers.ones, "adapter")}

    def begin(self, weight: Float[Array, "o i"], values: Mapping[str, Array]) -> dict[str, Array]:
        """As they are."""
        return dict(values)

    @staticmethod
    def outputs(
        linears: Sequence[Linear], x: Float[Array, "b s i"], ys: Sequence[Float[Array, "b s o"]], call: Call
    ) -> list[Float[Array, "b s o"]]:
        """Each y with its bias times the factors, or that of x times the factors."""

        def one(linear: Linear, y: Array) -> Array:
            factors = linear.part("ia3_l").reshape(-1)
            return linear.base(_scaled(x, factors), call) if linear.adapter.of_input else _scaled(y, factors)

        return [one(linear, y) for linear, y in zip(linears, ys)]

    def merged(self, weight: Float[Array, "o i"], values: Mapping[str, Array]) -> Float[Array, "o i"]:
        """Columns or rows of W times the factors."""
        return weight * values["ia3_l"]

    def merged_bias(self, bias: Float[Array, " o"], values: Mapping[str, Array]) -> Float[Array, " o"]:
        """Factors of the output are factors of the bias too."""
        return bias if self.of_input else bias * values["ia3_l"][:, 0]


def _scaled(x: Float[Array, "b s f"], factors: Float[Array, " f"]) -> Float[Array, "b s f"]:
    """In float32, so that their gradients are summed over the tokens in float32."""
    factors = jax.reshard(factors.astype(jnp.float32), jax.P(jax.typeof(x).sharding.spec[-1]))
    return (x.astype(jnp.float32) * factors).astype(x.dtype)
