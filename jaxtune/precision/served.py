"""The weight of a linear layer in quantization-aware training: products with what will be served, gradients without.

The forward pass multiplies by the quantized weight, with its adapter merged first if it has one. Rounding has a
gradient of zero almost everywhere, so the backward pass ignores it: the straight-through estimator (Bengio et al. 2013,
arXiv:1308.3432; for quantization Jacob et al. 2018, arXiv:1712.05877). The input may be rounded, too.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxtune.quant.array import QuantizedArray, divisors
from jaxtune.quant.fp8_format import LARGEST

INPUT_GROUP = 128  # features of a token that share a scale, in servers of FP8 weights with blocks of 128 x 128


@partial(jax.tree_util.register_dataclass, data_fields=("served", "plain"), meta_fields=("trained", "rounds_inputs"))
@dataclass(frozen=True)
class ServedWeight:
    """Replaces the weight (o, i) of a linear layer that is trained as it will be served.

    Attributes:
        served: what the forward pass multiplies by, made once in a step: quantized and, if `plain` is not quantized
            either, dequantized again, which takes memory and saves doing it in each product.
        plain: the weight itself. An Array that is trained receives the gradient; a frozen one, which may be quantized
            in another format, is what a reference model without adapters multiplies by.
        trained: whether `plain` receives a gradient.
        rounds_inputs: whether the layer's input is rounded to FP8 first.
    """

    served: Float[Array, "*stack o i"] | QuantizedArray
    plain: Any
    trained: bool
    rounds_inputs: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight, or of the stack."""
        return self.served.shape

    @property
    def dtype(self) -> Any:
        """The dtype of the dequantized weight."""
        return self.served.dtype


@jax.custom_vjp
def straight_through(value: Float[Array, "*shape"], surrogate: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Return `value`, and pass its gradient on to both: `surrogate` is computed in the backward pass only."""
    return value


straight_through.defvjp(lambda value, surrogate: (value, None), lambda _, gradient: (gradient, gradient))


def round_inputs(x: Float[Array, "*tokens i"]) -> Float[Array, "*tokens i"]:
    """Return x rounded to FP8 e4m3, with a scale for each token and each 128 features; its gradient ignores rounding.

    These are the scales of transformers' and vLLM's products with such weights ("activation_scheme": "dynamic").
    """
    *tokens, features = x.shape
    groups = jax.lax.stop_gradient(x).reshape(*tokens, features // INPUT_GROUP, INPUT_GROUP).astype(jnp.float32)
    scales = divisors(jnp.abs(groups).max(axis=-1, keepdims=True) / LARGEST)
    rounded = jnp.clip(groups / scales, -LARGEST, LARGEST).astype(jnp.float8_e4m3fn).astype(jnp.float32) * scales
    return straight_through(rounded.reshape(x.shape).astype(x.dtype), x)
