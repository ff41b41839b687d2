"""Inside a shard_map: which mesh axes an array varies over. What a kernel takes must vary over the same ones."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array


def varying_axes(*arrays: Any) -> frozenset[str]:
    """Mesh axes over which any of the arrays (or None) may differ between devices; none outside a shard_map."""
    return frozenset[str]().union(*(jax.typeof(x).manual_axis_type.varying for x in arrays if x is not None))


def vary_over(axes: frozenset[str], *arrays: Any) -> tuple[Any, ...]:
    """The arrays (or None) as differing over these axes too; the transpose sums their gradients over them."""

    def vary(x: Any) -> Array:
        missing = tuple(sorted(axes - varying_axes(x)))
        return jax.lax.pcast(x, missing, to="varying") if missing else jnp.asarray(x)

    return tuple(x if x is None else vary(x) for x in arrays)
