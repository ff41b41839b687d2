"""The device mesh: every axis always there, explicit, set once."""

import dataclasses
import math

import jax

from jaxtune.config.schema import Mesh
from jaxtune.errors import UserError
from jaxtune.parallel.layout import AXES


def make_mesh(mesh: Mesh) -> jax.sharding.Mesh:
    """A mesh over all devices of all processes and make it current. Raises UserError where the sizes do not fit."""
    sizes = dataclasses.asdict(mesh)
    devices = jax.device_count()
    known = math.prod(size for size in sizes.values() if size != -1)
    free = [axis for axis in AXES if sizes[axis] == -1]
    if free and devices % known == 0:
        sizes[free[0]] = devices // known
    if math.prod(sizes[axis] for axis in AXES) != devices:
        wanted = ", ".join(f"mesh.{axis}={sizes[axis]}" for axis in AXES if sizes[axis] != 1)
        raise UserError(
            f"{wanted or 'every mesh axis is 1'}: the axes span {known} devices and there are {devices}; "
            "set one axis to -1 to take what is left"
        )
    made = jax.make_mesh([sizes[axis] for axis in AXES], AXES)
    jax.set_mesh(made)
    return made


def data_shards(mesh: jax.sharding.Mesh) -> int:
    """Groups of devices that each compute rows of their own."""
    return mesh.shape["data"] * mesh.shape["fsdp"]
