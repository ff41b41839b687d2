"""Products of rows with the weight of their group: the public op, its derivative and its backends."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import registry
from pallas_kernels.gpus import current_device
from pallas_kernels.grouped_matmul import triton, xla_by_block, xla_by_group
from pallas_kernels.grouped_matmul.groups import Arrangement, Groups, arrange, block_of
from pallas_kernels.manual_axes import vary_over, varying_axes
from pallas_kernels.registry import ANY_GPU, Backend

__all__ = ["BACKENDS", "Arrangement", "Groups", "arrange", "block_of", "by_row", "grouped_matmul"]


BACKENDS = (
    Backend("triton", triton, triton.refuses, {ANY_GPU: "interpreted tests"}),
    Backend("xla", xla_by_group, xla_by_group.refuses, {ANY_GPU: "tests"}),
    Backend("xla", xla_by_block, registry.never_refuses, {ANY_GPU: "tests"}),
)


def grouped_matmul(x: Float[Array, "m i"], weight: Float[Array, "g o i"], groups: Groups) -> Float[Array, "m o"]:
    """Compute x W^T with the weight W of each row's group, in the dtype of x and accumulated in float32.

    Shapes: m rows, g groups, o and i rows and columns of a weight. Rows are in the order of `arrange`; rows without an
    item must be zeros, and their results are zeros. The gradient of x is dy W; the gradient of a weight is the sum of
    dy x^T over the rows of its group. No row is multiplied by the weight of another group.
    """
    if x.ndim != 2 or weight.ndim != 3 or x.shape[1] != weight.shape[2]:
        raise ValueError(f"grouped_matmul: x {x.shape} must be (rows, i) and the weights {weight.shape} (groups, o, i)")
    if len(groups.first) != len(weight) + 1 or len(x) % len(groups.block_group):
        raise ValueError(f"grouped_matmul: {len(x)} rows and {len(weight)} weights do not match the groups")
    # Outside the custom derivative: the transpose of the cast gives the gradient the weight's own dtype, and the
    # transpose of vary_over sums it over devices.
    x, weight, block_group, first = _vary_alike(x, weight.astype(x.dtype), groups.block_group, groups.first)
    return _matmul(x, weight, replace(groups, block_group=block_group, first=first))


def by_row(values: Float[Array, "g o"], groups: Groups, rows: int) -> Float[Array, "m o"]:
    """Return the values of each row's group; rows without an item get the values of an arbitrary group."""
    blocks = len(groups.block_group)
    # One gathered row for each block, not for each row. Blocks without rows have an index past the end, hence "clip".
    block_values = jnp.take(values, groups.block_group, axis=0, mode="clip")
    return jnp.broadcast_to(block_values[:, None], (blocks, rows // blocks, values.shape[1])).reshape(rows, -1)


def _vary_alike(*arrays: Array) -> tuple[Array, ...]:
    return vary_over(varying_axes(*arrays), *arrays)


@jax.custom_vjp
def _matmul(x: Array, weight: Array, groups: Groups) -> Array:
    return _choose_backend(weight, groups).multiply(x, weight, groups, transposed=False)


def _forward(x: Any, weight: Any, groups: Any) -> tuple[Array, tuple]:
    """Compute `_matmul` and its residuals.

    With symbolic_zeros=True an input has `perturbed`, whether it is differentiated: x is saved only if the weight is,
    because only the weight's gradient needs x.
    """
    groups = jax.tree.map(lambda part: part.value, groups)
    saved_x = x.value if weight.perturbed else None
    return _matmul(x.value, weight.value, groups), (saved_x, weight.value, groups)


def _backward(residuals: tuple, dy: Array) -> tuple[Array, Array | None, None]:
    x, weight, groups = residuals
    ops = _choose_backend(weight, groups)
    d_weight = None if x is None else ops.outer(dy, x, groups)
    return ops.multiply(dy, weight, groups, transposed=True), d_weight, None


_matmul.defvjp(_forward, _backward, symbolic_zeros=True)


def _choose_backend(weight: Array, groups: Groups) -> Any:
    # The weight decides, which forward and backward pass share, so both have the same backend.
    request = jax.ShapeDtypeStruct(weight.shape, weight.dtype)
    return registry.choose("grouped_matmul", BACKENDS, current_device(), request, groups.backend).run
