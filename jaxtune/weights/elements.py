"""One element of a parameter's leading axes, one layer or one expert, from wherever its shards are."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxtune.parallel.layout import axes_in
from jaxtune.parallel.offload import to_device
from jaxtune.quant.array import QuantizedArray


def gather_element(parameter: Any, index: tuple[int, ...]) -> jax.Array:
    """One element of a parameter's leading axes, dequantized, whole on every device."""
    return _of_stack(parameter, index) if index else jax.reshard(parameter, jax.P())


@jax.jit
def _of_stack(parameter: Any, index: tuple[int, ...]) -> jax.Array:
    """Compiled once a shape: the index is an argument of the program."""
    for number in index:
        parameter = to_device(jax.tree.map(partial(_element, number=number), parameter))
    return jax.reshard(parameter.dequantize() if isinstance(parameter, QuantizedArray) else parameter, jax.P())


def _element(stack: jax.Array, number: int | jax.Array) -> jax.Array:
    """An element of the leading axis, from the devices that hold it."""
    first, *rest = jax.typeof(stack).sharding.spec

    def on_device(stack: jax.Array, number: int | jax.Array) -> jax.Array:
        number = number - jax.lax.axis_index(axes_in(first)) * len(stack)
        found = jax.lax.dynamic_index_in_dim(stack, jnp.clip(number, 0, len(stack) - 1), keepdims=False)
        # What is added to another device's element must be -0: 0 would make 0 of -0.
        return jax.lax.psum(jnp.where((number >= 0) & (number < len(stack)), found, -jnp.zeros_like(found)), first)

    if first is None:
        return jax.lax.dynamic_index_in_dim(stack, number, keepdims=False)
    return jax.shard_map(on_device, in_specs=(jax.P(first, *rest), jax.P()), out_specs=jax.P(*rest))(stack, number)
