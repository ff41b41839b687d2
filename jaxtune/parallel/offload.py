"""Offloading to pinned host memory, and copies to the device and back, a layer at a time.

jax keeps an array's memory space in its type. Code that copies host arrays to the device therefore works in a run with
any of the options memory.offload_*, and in a run without. Imports nothing from jaxtune, so that models may import it.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jaxtyping import Array

KIND, Space = "pinned_host", jax.memory.Space


def on_host(sharding: jax.NamedSharding) -> jax.NamedSharding:
    """Return the sharding, in host memory."""
    host = jax.NamedSharding(sharding.mesh, sharding.spec, memory_kind=KIND)
    if host.memory_kind == KIND:
        return host
    # In ahead-of-time compilation the devices are not present and have no memories, so the sharding drops the kind. An
    # abstract mesh keeps it.
    return jax.NamedSharding(sharding.mesh.abstract_mesh, sharding.spec, memory_kind=KIND)


def is_on_host(leaf: Any) -> bool:
    """Return whether an array, or its abstract value, is in host memory."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf.sharding is not None and leaf.sharding.memory_kind == KIND
    aval = leaf if isinstance(leaf, ShapedArray) else jax.typeof(leaf)
    return aval.memory_space == Space.Host


def to_device(tree: Any) -> Any:
    """Copy the arrays of a pytree to device memory; arrays that are there already are not copied."""
    return jax.tree.map(lambda leaf: jax.device_put(leaf, Space.Device) if is_on_host(leaf) else leaf, tree)


@partial(jax.tree_util.register_dataclass, data_fields=("weight", "total"), meta_fields=())
@dataclass(frozen=True)
class AccumulatingWeight:
    """A stack of weights whose gradient the backward pass adds to a running sum, layer by layer, in the sum's memory.

    Attributes:
        weight: the weights; they get no gradient.
        total: the sum of the gradients of earlier micro-batches. Its cotangent is the sum including this micro-batch.
    """

    weight: Array
    total: Array


def copy_to_device(tree: Any) -> Any:
    """Copy a layer's weights to the device. Call it inside the rematerialised body, so that the copy is not saved."""

    def one(leaf: Any) -> Any:
        if isinstance(leaf, AccumulatingWeight):
            return _accumulate(to_device(leaf.weight), leaf.total)
        return to_device(leaf)

    return jax.tree.map(one, tree, is_leaf=lambda leaf: isinstance(leaf, AccumulatingWeight))


@jax.custom_vjp
def _accumulate(weight: Array, total: Array) -> Array:
    """Return the weight; its gradient becomes part of the cotangent of `total` (see `AccumulatingWeight`)."""
    return weight


@jax.named_scope("gradient_accumulation")
def _accumulate_backward(total: Array, gradient: Array) -> tuple[None, Array]:
    # Not a mathematical derivative: the cotangent slot carries total + gradient, so that gradient accumulation needs no
    # second array of the stack's size.
    gradient = jax.reshard(gradient, jax.typeof(total).sharding.spec)
    return None, put_like((to_device(total) + gradient).astype(total.dtype), total)


_accumulate.defvjp(lambda weight, total: (weight, total), _accumulate_backward)


@jax.named_scope("gradient_accumulation")
def zeros_of(stack: Array, dtype: Any, on_host: bool) -> Array:
    """Return zeros in the shape and sharding of a stack, on the host or the device; copies are of one layer at most."""

    def of_layer(layer: Array) -> Array:
        zeros = jnp.zeros_like(to_device(layer), dtype)
        return jax.device_put(zeros, Space.Host) if on_host else zeros

    return jax.lax.map(of_layer, stack) if on_host or is_on_host(stack) else jnp.zeros_like(stack, dtype)


def put_like(array: Array, like: Array) -> Array:
    """Return the array in the memory space of `like`."""
    return jax.device_put(array, Space.Host) if is_on_host(like) else array
