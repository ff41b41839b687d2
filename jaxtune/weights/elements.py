"""Gathering of one element of a parameter's leading axes, such as one layer or one expert, from its shards."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxtune.parallel.layout import axes_in
from jaxtune.parallel.offload import to_device
from jaxtune.quant.array import QuantizedArray


def gather_element(parameter: Any, index: tuple[int, ...]) -> jax.Array:
    """Return one element of a parameter's leading axes, dequantized and replicated on every device."""
    return _gather(parameter, index) if index else _dequantize(parameter)


def _dequantize(parameter: Any) -> jax.Array:
    return jax.reshard(parameter.dequantize() if isinstance(parameter, QuantizedArray) else parameter, jax.P())


@jax.jit
def _gather(parameter: Any, index: tuple[int, ...]) -> jax.Array:
    """Gather one element; `index` is traced, so that this compiles once a shape and not once a layer."""
    for number in index:
        parameter = to_device(jax.tree.map(partial(_element, number=number), parameter))
    return _dequantize(parameter)


def _element(stack: jax.Array, number: int | jax.Array) -> jax.Array:
    """Return an element of the leading axis, replicated from the devices that hold it."""
    first, *rest = jax.typeof(stack).sharding.spec

    def on_device(stack: jax.Array, number: int | jax.Array) -> jax.Array:
        number = number - jax.lax.axis_index(axes_in(first)) * len(stack)  # out of range on the other devices
        element = jax.lax.dynamic_index_in_dim(stack, jnp.clip(number, 0, len(stack) - 1), keepdims=False)
        # The other devices must add -0, because adding +0 would turn the element's -0 into +0.
        return jax.lax.psum(jnp.where((number >= 0) & (number < len(stack)), element, -jnp.zeros_like(element)), first)

    if first is None:
        return jax.lax.dynamic_index_in_dim(stack, number, keepdims=False)
    return jax.shard_map(on_device, in_specs=(jax.P(first, *rest), jax.P()), out_specs=jax.P(*rest))(stack, number)
