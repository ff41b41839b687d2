"""The device mesh and its layout rules. A mesh always has every axis, in explicit sharding mode, and is set once."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax

from jaxtune.errors import UserError
from jaxtune.parallel.layout import AXES, RULES, Axes, Layout, Rules, shards
from jaxtune.parallel.options import MeshOptions, ParallelOptions


def make_mesh(
    mesh: MeshOptions, devices: "Sequence[Any] | None" = None, parallel: ParallelOptions = ParallelOptions()
) -> jax.sharding.Mesh:
    """Make a mesh over all devices of all processes (or the given ones), and make it and its rules the current ones.

    Raises UserError if the sizes of the axes do not fit the number of devices.
    """
    devices = devices or jax.devices()
    sizes = dataclasses.asdict(mesh)
    known = math.prod(size for size in sizes.values() if size != -1)
    free = [axis for axis in AXES if sizes[axis] == -1]
    if len(free) > 1:
        both, other = ", ".join(f"mesh.{axis}=-1" for axis in free), "fsdp" if "fsdp" in free else free[-1]
        raise UserError(
            f"{both}: only one axis can take the devices that are left; set a size, such as --config.mesh.{other}=1"
        )
    if free and len(devices) % known == 0:
        sizes[free[0]] = len(devices) // known
    if math.prod(sizes[axis] for axis in AXES) != len(devices):
        wanted = ", ".join(f"mesh.{axis}={sizes[axis]}" for axis in AXES if sizes[axis] != 1)
        if free and known > 0:
            parts = " * ".join(f"mesh.{axis}={size}" for axis, size in sizes.items() if size not in (1, -1))
            fits = [size for size in range(1, len(devices) + 1) if len(devices) % size == 0]
            raise UserError(
                f"{parts} does not divide the {len(devices)} devices, of which mesh.{free[0]}=-1 takes the rest; these "
                f"would: {fits}"
            )
        others = [axis for axis in AXES if sizes[axis] != 1 and axis != "fsdp"]
        flags = " ".join(["--config.mesh.fsdp=-1", *(f"--config.mesh.{axis}=1" for axis in others)])
        raise UserError(
            f"{wanted or 'every mesh axis is 1'}: the axes span {known} devices and there are {len(devices)}; "
            f"set one axis to -1 to take what is left, or shard over all with {flags}"
        )
    # Devices that are next to each other differ in the last axis. AXES therefore end with tensor parallelism, which
    # communicates in every layer, and begin with data parallelism, which does so once a step.
    made = jax.make_mesh([sizes[axis] for axis in AXES], AXES, devices=devices)
    jax.set_mesh(made)
    RULES.set_global(rules_of(parallel, sizes["expert"] > 1, sizes["stage"] > 1))
    return made


def rules_of(parallel: ParallelOptions, experts_apart: bool = False, staged: bool = False) -> Rules:
    """Return the layout rules, with experts divided over the expert axis or not, and with a pipeline or not.

    In a pipeline's stages rows are whole. Outside the stages, the stage axis shards positions, so that all devices
    compute embedding, head, loss and the layers that are not in the pipeline.
    """
    expert_axes = ("expert",) if experts_apart else ()
    positions = ("context", "sequence", "stage") if staged else ("context", "sequence")
    shared = ("fsdp", *expert_axes, *positions)
    # Experts are divided in every ZeRO stage: tokens are sent to them, and they are not gathered.
    sharded, whole = Layout(embed=shared, experts=expert_axes), Layout(embed=(), experts=expert_axes)
    return Rules(
        parameters=sharded if parallel.zero == 3 else whole,
        gradients=whole if parallel.zero == 1 else sharded,
        optimizer=sharded,
        gathered=shared,
        residual=(*positions, "tensor") if parallel.shard_residual else positions,
        positions=positions,
        batch=("data", "fsdp", *expert_axes),
    )


def data_shards(mesh: jax.sharding.Mesh) -> int:
    """Return the number of groups of devices with different rows of the batch."""
    return shards(RULES.value.batch, mesh)


def misfit(mesh: jax.sharding.Mesh, axes: Axes, parts: int, what: str) -> str | None:
    """Return an error text with the sizes that fit if the given mesh axes together do not divide `parts`; else None."""
    if parts % shards(axes, mesh) == 0:
        return None
    divided = " * ".join(f"mesh.{axis}={mesh.shape[axis]}" for axis in axes if mesh.shape[axis] > 1)
    fits = [n for n in range(1, mesh.size + 1) if parts % n == 0]
    return f"{divided} does not divide {what}; these would: {fits}"
