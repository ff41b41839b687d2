"""Learned factors that multiply activations: (IA)^3 (Liu et al. 2022)."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxtune.errors import UserError
from jaxtune.models.declared import declare_parameter
from jaxtune.models.forward_options import ForwardOptions
from jaxtune.models.layers.linear import Linear
from jaxtune.models.structure.model_spec import ModelSpec
from jaxtune.models.treatment import linears as linears_of


@dataclass(frozen=True)
class IA3:
    """A learned factor for each feature of a linear layer's output or input: an `Adapter` of models.layers.linear.

    Attributes:
        of_input: the factors multiply the input, not the output.
        owner: the part of a fused module that holds shared parameters; not used, because IA3 shares none.
    """

    of_input: bool
    owner: str | None = None

    peft_names: ClassVar[Mapping[str, str]] = {"ia3_l": "ia3_l"}
    shared: ClassVar[frozenset[str]] = frozenset()
    from_weight: ClassVar[bool] = False

    def declare(self, shape: tuple[int, int], axes: tuple[str | None, ...]) -> dict[str, Any]:
        """Declare factors of one in peft's shape: (1, in) for the input, (out, 1) for the output."""
        out, inner = shape
        shape_and_axes = ((1, inner), (None, axes[1])) if self.of_input else ((out, 1), (axes[0], None))
        return {"ia3_l": declare_parameter(*shape_and_axes, nnx.initializers.ones, "adapter")}

    def begin(self, weight: Float[Array, "o i"], values: Mapping[str, Array]) -> dict[str, Array]:
        """Return the values unchanged."""
        return dict(values)

    @staticmethod
    def outputs(
        linears: Sequence[Linear], x: Float[Array, "b s i"], ys: Sequence[Float[Array, "b s o"]], call: ForwardOptions
    ) -> list[Float[Array, "b s o"]]:
        """Return each y (bias included) times its factors, or the layer's output for x times the factors."""

        def one(linear: Linear, y: Array) -> Array:
            factors = linear.part("ia3_l").reshape(-1)
            # With factors on the input, y itself is not used, so XLA drops its product.
            return linear.base(_scale(x, factors), call) if linear.adapter.of_input else _scale(y, factors)

        return [one(linear, y) for linear, y in zip(linears, ys)]

    def merged(self, weight: Float[Array, "o i"], values: Mapping[str, Array]) -> Float[Array, "o i"]:
        """Return W with its columns (factors of the input) or rows (of the output) times the factors."""
        return weight * values["ia3_l"]

    def merged_bias(self, bias: Float[Array, " o"], values: Mapping[str, Array]) -> Float[Array, " o"]:
        """Return the bias; factors of the output multiply it too."""
        return bias if self.of_input else bias * values["ia3_l"][:, 0]


def place(spec: ModelSpec, chosen: Set[str], targets: str | tuple[str, ...]) -> dict[IA3, Set[str]]:
    """Return the layers whose input and whose output have factors, by their names in the checkpoint files.

    Raises UserError for experts, and if keys are part of a fused layer.
    """
    known = linears_of(spec)
    inner = {name for name in chosen if known[name][0].local.endswith(".down.weight")}
    if targets == "all-linear":
        # The layers of the paper: keys, values, and the input of the down projection.
        keys = ("attention.k.weight", "attention.v.weight")
        chosen = inner | {name for name in chosen if all(site.local in keys for site in known[name])}
        if chosen == inner:
            raise UserError(
                f"lora.kind='ia3': keys and values of this {spec.family} are part of a fused layer; name layers in "
                "lora.target_modules, whose whole output gets factors"
            )
    if experts := sorted(name for name in chosen if known[name][0].of_experts):
        raise UserError(
            f"lora.kind='ia3': experts, such as {experts[0]}, have no factors; leave them out of lora.target_modules"
        )
    return {adapter: names for adapter, names in ((IA3(True), inner), (IA3(False), chosen - inner)) if names}


def _scale(x: Float[Array, "b s f"], factors: Float[Array, " f"]) -> Float[Array, "b s f"]:
    """Multiply x by the factors in float32, so that their gradients are summed over the tokens in float32."""
    factors = jax.reshard(factors.astype(jnp.float32), jax.P(jax.typeof(x).sharding.spec[-1]))
    return (x.astype(jnp.float32) * factors).astype(x.dtype)
