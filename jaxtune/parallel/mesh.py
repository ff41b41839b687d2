"""The device mesh: every axis always there, explicit, set once."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax

from jaxtune.config.schema import Mesh
from jaxtune.errors import UserError
from jaxtune.parallel.layout import AXES, spec


def make_mesh(mesh: Mesh, devices: "Sequence[Any] | None" = None) -> jax.sharding.Mesh:
    """A mesh over all devices of all processes (or these), current from now on.

    Raises UserError where the sizes do not fit.
    """
    devices = devices or jax.devices()
    sizes = dataclasses.asdict(mesh)
    known = math.prod(size for size in sizes.values() if size != -1)
    free = [axis for axis in AXES if sizes[axis] == -1]
    if free and len(devices) % known == 0:
        sizes[free[0]] = len(devices) // known
    if math.prod(sizes[axis] for axis in AXES) != len(devices):
        wanted = ", ".join(f"mesh.{axis}={sizes[axis]}" for axis in AXES if sizes[axis] != 1)
        raise UserError(
            f"{wanted or 'every mesh axis is 1'}: the axes span {known} devices and there are {len(devices)}; "
            "set one axis to -1 to take what is left"
        )
    made = jax.make_mesh([sizes[axis] for axis in AXES], AXES, devices=devices)
    jax.set_mesh(made)
    return made


def data_shards(mesh: jax.sharding.Mesh) -> int:
    """Groups of devices that each compute rows of their own."""
    return mesh.shape["data"] * mesh.shape["fsdp"]


def misfit(mesh: jax.sharding.Mesh, dimension: str | None, parts: int, what: str) -> str | None:
    """A complaint, with the sizes that fit, if the mesh axis of a logical dimension does not divide so many parts."""
    (axis,) = spec(dimension)
    if not isinstance(axis, str) or parts % mesh.shape[axis] == 0:
        return None
    fits = [n for n in range(1, mesh.size + 1) if parts % n == 0]
    return f"mesh.{axis}={mesh.shape[axis]} does not divide {what}; these would: {fits}"
