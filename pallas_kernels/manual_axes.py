"""Inside a shard_map: which mesh axes an array varies over. All arguments of a kernel must vary over the same axes."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array


def varying_axes(*arrays: Any) -> frozenset[str]:
    """Return the mesh axes over which any of the arrays may differ between devices; empty outside a shard_map.

    An array may be None.
    """
    return frozenset[str]().union(*(jax.typeof(x).manual_axis_type.varying for x in arrays if x is not None))


def vary_over(axes: frozenset[str], *arrays: Any) -> tuple[Any, ...]:
    """Mark the arrays (or None) as varying over these axes too; the transpose sums their gradients over the axes."""

    def vary(x: Any) -> Array:
        missing = tuple(sorted(axes - varying_axes(x)))
        return jax.lax.pcast(x, missing, to="varying") if missing else jnp.asarray(x)

    return tuple(x if x is None else vary(x) for x in arrays)
