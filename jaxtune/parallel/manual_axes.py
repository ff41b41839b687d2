"""What devices compute apart from the others along some axes of the mesh, each with its part of the rows or layers."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxtune.parallel.layout import RULES, Axes, P
from jaxtune.parallel.offload import is_on_host, put_beside, to_device

# Before 0.11 jax marks what goes into `apart`, or comes out of it, as whole along the other axes: XLA gathers it there.
GATHERS_OTHER_AXES = jax.__version_info__ < (0, 11)


def apart(axes: Axes, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """The function on the devices that are at one place along these axes, as if they were all: the axes are manual.

    Not to be differentiated; and out_specs are taken at their word.
    """

    def inside(*arguments: Any) -> Any:
        with RULES(RULES.value.apart(*axes)):
            return function(*arguments)

    return jax.shard_map(inside, in_specs=in_specs, out_specs=out_specs, axis_names=set(axes), check_vma=False)


def with_others(tree: Any, axes: Axes, dimension: int = 0) -> Any:
    """Arrays with the rows of all devices along these axes, in their order; those of others get no gradient."""

    def one(rows: Array) -> Array:
        spec = list(jax.typeof(rows).sharding.spec)
        spec[dimension] = None
        rows = jax.reshard(rows, P(*spec))
        of_all = jax.lax.all_gather(jax.lax.stop_gradient(rows), axes, axis=dimension, tiled=True)
        first = jax.lax.axis_index(axes) * rows.shape[dimension]
        return jax.lax.dynamic_update_slice_in_dim(of_all, rows, first, dimension)

    return jax.tree.map(one, tree) if axes else tree


def summed_over(tree: Any, axes: Axes) -> Any:
    """The sum over all devices along these axes, in float32; of what is on the host, a layer at a time."""

    def one(part: Array) -> Array:
        total = jax.lax.psum(to_device(part).astype(jnp.float32), axes)
        return put_beside(total.astype(part.dtype), part)

    def whole(part: Array) -> Array:
        return jax.lax.map(one, part) if is_on_host(part) else one(part)

    return jax.tree.map(whole, tree) if axes else tree
