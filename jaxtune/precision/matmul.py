"""x W^T whose forward and backward products are computed in low precision, on any mesh."""

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxtune.parallel.layout import TOKENS, P, gather
from jaxtune.precision.operands import Numbers, Operands, operands_at
from jaxtune.quant.array import QuantizedArray
from pallas_kernels.manual_axes import varying_axes

if TYPE_CHECKING:
    from jaxtune.models.dropout import Noise

# What the backward pass wants of the forward one for delayed scales, a number a linear, in policies of jax.checkpoint.
MAXIMA = "largest magnitudes"


@partial(jax.tree_util.register_dataclass, data_fields=("operands", "weight", "scales"), meta_fields=("numbers",))
@dataclass(frozen=True)
class LowPrecision:
    """What stands for the weight (o, i) of a linear that is multiplied in low precision.

    Attributes:
        operands: the weight as the products want it; None: made from `weight` where it is used, in each pass again.
        weight: an Array gets the gradient, in its dtype; with operands, made from it once a step, it is not read
            otherwise. A QuantizedArray is dequantized where it is used, and frozen. None: the operands alone, frozen.
        scales: of x and of dy, known from earlier steps: what is too large for them saturates. The cotangent is the
            largest magnitude of x and of dy, whatever the loss (as flax.linen.fp8_ops overwrites with the gradient).
            None, or 0 where the numbers are `online`: each tensor's own largest magnitude makes its scale.
        numbers: how it is quantized and multiplied.
    """

    operands: Operands | None
    weight: Float[Array, "*stack o i"] | QuantizedArray | None
    scales: Float[Array, "*stack 2"] | None
    numbers: Numbers


def matmul(
    x: Float[Array, "b s i"], weight: LowPrecision, axis: str | None, noise: "Noise | None"
) -> Float[Array, "b s o"]:
    """x W^T in the dtype of x; `axis` is the mesh axis of o.

    Gradients reach x, a weight that is an Array, and the scales. With a frozen weight nothing of x is kept for them.
    Codes are gathered over `fsdp`, in each pass again. noise: of this place in the model, for gradients that are
    rounded stochastically. Raises ValueError for scales that the numbers do not have, and from the backward pass where
    it needs noise and there is none.
    """
    if weight.scales is not None and not weight.numbers.delayed:
        raise ValueError(f"{type(weight.numbers).__name__} has no delayed scaling: scales is to be None")
    if weight.operands is None and weight.weight is None:
        raise ValueError("LowPrecision needs operands, or a weight to make them from")
    if isinstance(weight.weight, QuantizedArray):
        weight = LowPrecision(weight.operands, jax.lax.stop_gradient(weight.weight), weight.scales, weight.numbers)
    trained = None
    if isinstance(weight.weight, jax.Array):
        trained = WeightGradient(jnp.dtype(weight.weight.dtype), jax.typeof(weight.weight).sharding.spec)
    return _matmul(axis, trained, jax.reshard(x, P(*TOKENS, _inner(weight))), weight, noise)


@dataclass(frozen=True)
class WeightGradient:
    """What the gradient of a weight is like."""

    dtype: Any
    spec: P


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _matmul(axis, trained, x, weight: LowPrecision, noise):
    return _forward(axis, trained, x, weight, noise)[0]


def _forward(axis, trained: WeightGradient | None, x, weight: LowPrecision, noise):
    operand = jax.tree.map(gather, _operands(weight).forward)
    inner = _inner(weight)

    def product(x, operand, scales):
        y, found = weight.numbers.forward(x, operand, None if scales is None else scales[0])
        return (y if inner is None else jax.lax.psum(y, inner)), found

    arguments = x, operand, weight.scales
    y, largest_x = jax.shard_map(product, in_specs=_specs(arguments), out_specs=(P(*TOKENS, axis), P()))(*arguments)
    if weight.operands is not None:
        weight = LowPrecision(weight.operands, None, weight.scales, weight.numbers)
    largest_x = None if weight.scales is None else checkpoint_name(largest_x, MAXIMA)
    return y, (None if trained is None else x, weight, noise, largest_x)


def _backward(axis, trained: WeightGradient | None, residuals, dy):
    x, weight, noise, largest_x = residuals
    operands = _operands(weight)
    operand = jax.tree.map(gather, operands.forward if operands.backward is None else operands.backward)
    inner = _inner(weight)
    dy_spec = jax.typeof(dy).sharding.spec
    random = jax.tree.map(lambda bits: jax.reshard(bits, dy_spec), weight.numbers.random(noise, dy.shape))

    def products(dy, x, operand, scales, random):
        dtype = None if trained is None else trained.dtype
        dx, dw, found = weight.numbers.backward(dy, x, operand, scales, random, dtype)
        return (dx if axis is None else jax.lax.psum(dx, axis)), _summed(dw, trained), found

    arguments = dy, x, operand, weight.scales, random
    out_specs = P(*TOKENS, inner), None if trained is None else trained.spec, P()
    dx, dw, largest_dy = jax.shard_map(products, in_specs=_specs(arguments), out_specs=out_specs)(*arguments)
    found = None if weight.scales is None else jnp.stack([largest_x, largest_dy])
    return dx, LowPrecision(None, dw, found, weight.numbers), None


_matmul.defvjp(_forward, _backward)


def _operands(weight: LowPrecision) -> Operands:
    if weight.operands is not None:
        return weight.operands
    matrix = weight.weight.dequantize() if isinstance(weight.weight, QuantizedArray) else weight.weight
    assert matrix is not None
    return operands_at(matrix, weight.numbers, jax.typeof(matrix).sharding.spec)


def _inner(weight: LowPrecision) -> str | None:
    """The mesh axis of i in a product."""
    stored = weight.operands.forward.codes if weight.operands is not None else weight.weight
    codes = stored.codes if isinstance(stored, QuantizedArray) else stored
    axis = jax.typeof(codes).sharding.spec[1]
    return None if axis == "fsdp" else axis


def _summed(gradient: Float[Array, "o i"] | None, trained: WeightGradient | None) -> Float[Array, "..."] | None:
    """The gradient of the whole batch, each device with its part of the weight."""
    if gradient is None or trained is None:
        return None
    gathered = [dimension for dimension, axis in enumerate(trained.spec) if axis == "fsdp"]
    kept = {axis for axis in trained.spec if axis is not None}
    others = tuple(sorted(varying_axes(gradient) - kept))
    if others:
        gradient = jax.lax.psum(gradient, others)
    for dimension in gathered:
        gradient = jax.lax.psum_scatter(gradient, "fsdp", scatter_dimension=dimension, tiled=True)
    return gradient


def _specs(arguments: Any) -> Any:
    return jax.tree.map(lambda array: jax.typeof(array).sharding.spec, arguments)
