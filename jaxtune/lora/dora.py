"""Weight-decomposed low-rank adapters: DoRA (Liu et al. 2024, arXiv:2402.09353)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxtune.lora.lora import LoRA, adapter_outputs, apply_dropout, matrices_of
from jaxtune.models.declared import declare_parameter
from jaxtune.models.forward_options import ForwardOptions
from jaxtune.models.layers.linear import Linear
from jaxtune.parallel.layout import P, drop_gathered_axes, gather
from jaxtune.quant.array import QuantizedArray


@dataclass(frozen=True)
class DoRA(LoRA):
    """An adapter that divides each row of W + scale · B A by its norm and multiplies it by a trained magnitude.

    As in the paper (4.3) and in peft, the norm is constant in the gradient.
    """

    from_weight: ClassVar[bool] = True

    @property
    def peft_names(self) -> Mapping[str, str]:
        """The names of LoRA's parameters and of the magnitude."""
        return {**super().peft_names, "magnitude": "lora_magnitude_vector"}

    def declare(self, shape: tuple[int, int], axes: tuple[str | None, ...]) -> dict[str, Any]:
        """Declare A and B as in LoRA, and a magnitude (out,)."""
        magnitude = declare_parameter(shape[:1], axes[:1], nnx.initializers.ones, "adapter")
        return {**super().declare(shape, axes), "magnitude": magnitude}

    def begin(self, weight: Float[Array, "o i"], values: Mapping[str, Array]) -> dict[str, Array]:
        """Set the magnitude to the norms of the weight's rows, so that the layer's output starts unchanged."""
        return {**super().begin(weight, values), "magnitude": jnp.linalg.norm(weight, axis=-1)}

    @staticmethod
    def outputs(
        linears: Sequence[Linear], x: Float[Array, "b s i"], ys: Sequence[Float[Array, "b s o"]], call: ForwardOptions
    ) -> list[Float[Array, "b s o"]]:
        """Return (each y + the adapter's output) times magnitude / norm; the bias, which y includes, is not scaled."""

        def one(linear: Linear, y: Array, extra: Array, matrices: tuple[Array, Array]) -> Array:
            factor = linear.part("magnitude").astype(jnp.float32) / _norms(linear, *matrices)
            factor = jax.reshard(factor, P(jax.typeof(y).sharding.spec[-1]))
            # As in peft, y comes from the full x, but the product that (factor - 1) multiplies from the dropped x.
            adapter_x = apply_dropout(linear, x, call)
            base = (y if adapter_x is x else linear.base(adapter_x, call)).astype(jnp.float32)
            if linear.bias is not None:
                base -= jax.reshard(linear.bias.astype(jnp.float32), P(jax.typeof(y).sharding.spec[-1]))
            # y has the base product once already, so only the rest of factor * (base + extra) is added.
            correction = (factor - 1) * base + factor * extra.astype(jnp.float32)
            return (y.astype(jnp.float32) + correction).astype(y.dtype)

        return [one(*each) for each in zip(linears, ys, adapter_outputs(linears, x, call), matrices_of(linears))]

    def merged(self, weight: Float[Array, "o i"], values: Mapping[str, Array]) -> Float[Array, "o i"]:
        """Return the rows of W + scale · B A times magnitude / norm."""
        combined = super().merged(weight, values)
        return combined * (values["magnitude"] / jnp.linalg.norm(combined, axis=-1))[:, None]


def _norms(linear: Linear, a: Float[Array, "r i"], b: Float[Array, "o r"]) -> Float[Array, " o"]:
    """Compute the norms of the rows of W + scale · B A in float32, without forming that matrix.

    The squared norms are |w|² + 2 scale (W Aᵀ · B) + scale² (B A Aᵀ · B), with · a dot product per row.
    """
    weight = jax.tree.map(gather, linear.weight.get_value())
    weight = weight.dequantize() if isinstance(weight, QuantizedArray) else weight
    weight, a, b = (jax.lax.stop_gradient(gather(array.astype(jnp.float32))) for array in (weight, a, b))
    rows, scale = drop_gathered_axes(jax.typeof(weight).sharding.spec[0]), linear.adapter.scale
    squares = jnp.sum(weight * weight, axis=-1)  # not a dot, because a recipe may round dot products
    crossed = jnp.einsum("oi,ri->or", weight, a, out_sharding=P(rows, None))
    gram = jnp.einsum("ri,si->rs", a, a, out_sharding=P(None, None))
    return jnp.sqrt(squares + jnp.sum((2 * scale * crossed + scale**2 * (b @ gram)) * b, axis=-1))
