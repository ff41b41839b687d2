"""The weight of a linear layer in quantization-aware training: products with what will be served, gradients without.

The forward pass multiplies by the quantized weight, with its adapter merged first if it has one. Rounding has a
gradient of zero almost everywhere, so the backward pass ignores it: the straight-through estimator (Bengio et al. 2013,
arXiv:1308.3432; for quantization Jacob et al. 2018, arXiv:1712.05877).
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jaxtyping import Array, Float

from jaxtune.quant.array import QuantizedArray


@partial(jax.tree_util.register_dataclass, data_fields=("served", "plain"), meta_fields=("trained",))
@dataclass(frozen=True)
class ServedWeight:
    """Replaces the weight (o, i) of a linear layer that is trained as it will be served.

    Attributes:
        served: what the forward pass multiplies by, made once in a step: quantized and, if `plain` is not quantized
            either, dequantized again, which takes memory and saves doing it in each product.
        plain: the weight itself. An Array that is trained receives the gradient; a frozen one, which may be quantized
            in another format, is what a reference model without adapters multiplies by.
        trained: whether `plain` receives a gradient.
    """

    served: Float[Array, "*stack o i"] | QuantizedArray
    plain: Any
    trained: bool

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
