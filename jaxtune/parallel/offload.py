"""What waits in the pinned memory of the host, and its way to the device and back, a layer at a time.

jax keeps the memory of an array in its type, so that code which puts on the device what is on the host serves a run
with any of the options memory.offload_*, and one without. Imports nothing from jaxtune, so that models may use it.
"""

from typing import Any

import jax
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


def put_beside(array: Array, like: Array) -> Array:
    """The array in the memory that `like` is in."""
    return jax.device_put(array, Space.Host) if is_on_host(like) else array
