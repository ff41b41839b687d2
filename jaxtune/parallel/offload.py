"""What waits in the pinned memory of the host, and its way to the device and back, a layer at a time.

jax keeps the memory of an array in its type, so that code which puts on the device what is on the host serves a run
with any of the options memory.offload_*, and one without. Imports nothing from jaxtune, so that models may use it.
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
    """The sharding, in the host's memory."""
    found = jax.NamedSharding(sharding.mesh, sharding.spec, memory_kind=KIND)
    if found.memory_kind == KIND:
        return found
    # Devices that are compiled for and not there have no memories, and make the sharding forget the kind.
    return jax.NamedSharding(sharding.mesh.abstract_mesh, sharding.spec, memory_kind=KIND)


def is_on_host(leaf: Any) -> bool:
    """Whether an array, or what stands for one, is in the host's memory."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf.sharding is not None and leaf.sharding.memory_kind == KIND
    aval = leaf if isinstance(leaf, ShapedArray) else jax.typeof(leaf)
    return aval.memory_space == Space.Host


def to_device(tree: Any) -> Any:
    """The arrays of a pytree in the device's memory; those that are there stay as they are."""
    return jax.tree.map(lambda leaf: jax.device_put(leaf, Space.Device) if is_on_host(leaf) else leaf, tree)


@partial(jax.tree_util.register_dataclass, data_fields=("weight", "total"), meta_fields=())
@dataclass(frozen=True)
class Added:
    """A stack of weights whose gradient the backward pass adds to a sum, layer by layer, where the sum is.

    Attributes:
        weight: gets no gradient.
        total: of the gradients of earlier micro-batches. Its cotangent is the sum with that of this one.
    """

    weight: Array
    total: Array


def landed(tree: Any) -> Any:
    """A layer's slice of weights, on the device: called inside its rematerialised body, so that no copy is kept."""

    def one(leaf: Any) -> Any:
        return _added(to_device(leaf.weight), leaf.total) if isinstance(leaf, Added) else to_device(leaf)

    return jax.tree.map(one, tree, is_leaf=lambda leaf: isinstance(leaf, Added))


@jax.custom_vjp
def _added(weight: Array, total: Array) -> Array:
    """The weight; see `Added`."""
    return weight


def _added_backward(total: Array, gradient: Array) -> tuple[None, Array]:
    return None, put_beside((to_device(total) + gradient).astype(total.dtype), total)


_added.defvjp(lambda weight, total: (weight, total), _added_backward)


def zeros_of(stack: Array, dtype: Any, on_host: bool) -> Array:
    """Zeros in the shape and sharding of a stack, on the host or on the device; neither is ever whole elsewhere."""

    def of_layer(layer: Array) -> Array:
        zeros = jnp.zeros_like(to_device(layer), dtype)
        return jax.device_put(zeros, Space.Host) if on_host else zeros

    return jax.lax.map(of_layer, stack) if on_host or is_on_host(stack) else jnp.zeros_like(stack, dtype)


def put_beside(array: Array, like: Array) -> Array:
    """The array in the memory that `like` is in."""
    return jax.device_put(array, Space.Host) if is_on_host(like) else array
