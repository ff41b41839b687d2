"""x W^T whose forward and backward products are computed in low precision, on any mesh.

Shapes: b batch, s sequence, i inputs and o outputs of the layer.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxtune.parallel.layout import RULES, Entry, P, axes_in, by_token, drop_gathered_axes, gather
from jaxtune.parallel.random import Noise
from jaxtune.precision.operands import MatmulFormat, Operands, operands_at
from jaxtune.quant.array import QuantizedArray
from pallas_kernels.manual_axes import varying_axes

# The name of x's amax in policies of jax.checkpoint. The backward pass needs it for delayed scaling; it is one scalar
# per linear layer.
MAXIMA = "largest magnitudes"


@partial(jax.tree_util.register_dataclass, data_fields=("operands", "weight", "scales"), meta_fields=("numbers",))
@dataclass(frozen=True)
class LowPrecision:
    """Replaces the array of a weight (o, i) whose linear layer is multiplied in low precision.

    Attributes:
        operands: the weight as the products take it; None: made from `weight` at each use, forward and backward.
        weight: an Array is trained and receives the gradient, in its dtype; if `operands` is set, they were made from
            it once this step and its values are not read. A QuantizedArray is frozen and dequantized at each use.
            None: the weight is frozen and only `operands` holds it.
        scales: the scales of x and dy, from earlier steps (delayed scaling); values too large for them saturate. Their
            cotangent is not a gradient but the amax of x and of dy, whatever the loss: this is how amax leaves the
            backward pass (as in flax.linen.fp8_ops). None, or 0 if `numbers.online`: current scaling, by each tensor's
            own amax.
        numbers: the number format and how it multiplies.
    """

    operands: Operands | None
    weight: Float[Array, "*stack o i"] | QuantizedArray | None
    scales: Float[Array, "*stack 2"] | None
    numbers: MatmulFormat

    def matmul(self, x: Float[Array, "b s i"], axis: Entry, noise: Noise | None) -> Float[Array, "b s o"]:
        """Compute x W^T in the dtype of x; `axis` is the mesh axis, or axes, that shard o.

        Gradients reach x, a weight that is an Array, and the scales. With a frozen weight x is not saved for the
        backward pass. Codes are all-gathered in the forward pass and again in the backward pass. `noise` is the source
        of randomness at this place in the model, for stochastic rounding of gradients. Raises ValueError if scales are
        given and the format has no delayed scaling, and from the backward pass if it needs noise and has none.
        """
        if self.scales is not None and not self.numbers.delayed:
            raise ValueError(f"{type(self.numbers).__name__} has no delayed scaling: scales must be None")
        if self.operands is None and self.weight is None:
            raise ValueError("LowPrecision needs operands, or a weight to make them from")
        weight, trained = self, None
        if isinstance(self.weight, QuantizedArray):
            weight = replace(self, weight=jax.lax.stop_gradient(self.weight))
        if isinstance(self.weight, jax.Array):
            trained = WeightGradient(jnp.dtype(self.weight.dtype), jax.typeof(self.weight).sharding.spec)
        return _matmul(axis, trained, jax.reshard(x, P(*by_token(), _inner(weight))), weight, noise)


@dataclass(frozen=True)
class WeightGradient:
    """Dtype and PartitionSpec of a weight's gradient, the same as the weight's."""

    dtype: Any
    spec: P


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _matmul(axis, trained, x, weight: LowPrecision, noise):
    """Compute `LowPrecision.matmul`; `trained`: dtype and PartitionSpec of the weight's gradient, None if frozen."""
    return _forward(axis, trained, x, weight, noise)[0]


def _forward(axis, trained: WeightGradient | None, x, weight: LowPrecision, noise):
    """Return the product, and the residuals: x (only if dW is needed), the weight, the noise and the amax of x."""
    operand = jax.tree.map(gather, _operands(weight).forward)
    inner = _inner(weight)

    def product(x, operand, scales):
        # Runs on one device's shard. If i is sharded (tensor parallelism) each device has a part of the sum over i.
        y, amax = weight.numbers.forward(x, operand, None if scales is None else scales[0])
        return (y if inner is None else jax.lax.psum(y, inner)), amax

    arguments = x, operand, weight.scales
    y, amax_x = jax.shard_map(product, in_specs=_specs(arguments), out_specs=(P(*by_token(), axis), P()))(*arguments)
    if weight.operands is not None:
        # The backward pass reads the operands, not the array that they were made from: do not save the array too.
        weight = LowPrecision(weight.operands, None, weight.scales, weight.numbers)
    # Named, so that every rematerialisation policy saves it: recomputing it would need x and an all-reduce.
    amax_x = None if weight.scales is None else checkpoint_name(amax_x, MAXIMA)
    return y, (None if trained is None else x, weight, noise, amax_x)


def _backward(axis, trained: WeightGradient | None, residuals, dy):
    """Return cotangents of x, the weight and the noise; the scales' cotangent is the amax of x and of dy."""
    x, weight, noise, amax_x = residuals
    operands = _operands(weight)
    operand = jax.tree.map(gather, operands.forward if operands.backward is None else operands.backward)
    inner = _inner(weight)
    dy_spec = jax.typeof(dy).sharding.spec
    # Drawn for the global dy, then sharded like dy, so that the bits are the same on any mesh.
    random = jax.tree.map(lambda bits: jax.reshard(bits, dy_spec), weight.numbers.random(noise, dy.shape))

    def products(dy, x, operand, scales, random):
        dtype = None if trained is None else trained.dtype
        dx, dw, amax = weight.numbers.backward(dy, x, operand, scales, random, dtype)
        # dx contracts over o, which `axis` shards.
        return (dx if axis is None else jax.lax.psum(dx, axis)), _sum_gradient(dw, trained), amax

    arguments = dy, x, operand, weight.scales, random
    out_specs = P(*by_token(), inner), None if trained is None else trained.spec, P()
    dx, dw, amax_dy = jax.shard_map(products, in_specs=_specs(arguments), out_specs=out_specs)(*arguments)
    amax = None if weight.scales is None else jnp.stack([amax_x, amax_dy])
    # None is a cotangent of zeros: operands are made outside this function, without a gradient.
    return dx, LowPrecision(None, dw, amax, weight.numbers), None


_matmul.defvjp(_forward, _backward)


def _operands(weight: LowPrecision) -> Operands:
    """Return the operands that the weight holds, or make them."""
    if weight.operands is not None:
        return weight.operands
    matrix = weight.weight.dequantize() if isinstance(weight.weight, QuantizedArray) else weight.weight
    assert matrix is not None
    return operands_at(matrix, weight.numbers, jax.typeof(matrix).sharding.spec)


def _inner(weight: LowPrecision) -> Entry:
    """Return the mesh axes that still shard i in a product, after the weight is gathered."""
    stored = weight.operands.forward.codes if weight.operands is not None else weight.weight
    codes = stored.codes if isinstance(stored, QuantizedArray) else stored
    return drop_gathered_axes(jax.typeof(codes).sharding.spec[1])


def _sum_gradient(gradient: Float[Array, "o i"] | None, trained: WeightGradient | None) -> Float[Array, "..."] | None:
    """Sum the gradient over the whole batch; each device gets its shard of the weight."""
    if gradient is None or trained is None:
        return None
    # All-reduce over axes that do not shard the weight (data parallelism); reduce-scatter over axes that it was
    # all-gathered over (fully sharded data parallelism).
    stored = [axes_in(entry) for entry in trained.spec]
    unsharded = tuple(sorted(varying_axes(gradient).difference(*stored)))
    if unsharded:
        gradient = jax.lax.psum(gradient, unsharded)
    for dimension, axes in enumerate(stored):
        if gathered := tuple(axis for axis in axes if axis in RULES.value.gathered):
            gradient = jax.lax.psum_scatter(gradient, gathered, scatter_dimension=dimension, tiled=True)
    return gradient


def _specs(arguments: Any) -> Any:
    return jax.tree.map(lambda array: jax.typeof(array).sharding.spec, arguments)
