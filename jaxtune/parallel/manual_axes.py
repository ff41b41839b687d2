"""Manual axes: devices along some mesh axes compute independently, each with its part of the rows or layers."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxtune.parallel.layout import RULES, Axes, P
from jaxtune.parallel.offload import is_on_host, put_like, to_device

# jax before 0.11 marks inputs and outputs of `with_manual_axes` as replicated along other axes, and XLA gathers them.
GATHERS_OTHER_AXES = jax.__version_info__ < (0, 11)


def with_manual_axes(axes: Axes, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """Return the function with the given axes manual: it runs on each group of devices with one index along them.

    Inside, the layout rules are those of a mesh without these axes. The function must not be differentiated, and
    out_specs are not checked.
    """

    def inside(*arguments: Any) -> Any:
        with RULES(RULES.value.apart(*axes)):
            return function(*arguments)

    return jax.shard_map(inside, in_specs=in_specs, out_specs=out_specs, axis_names=set(axes), check_vma=False)


@jax.named_scope("collectives")
def all_gather_rows(tree: Any, axes: Axes, dimension: int = 0) -> Any:
    """All-gather rows of arrays over the given axes, in order; only the device's own rows get a gradient."""

    def one(rows: Array) -> Array:
        spec = list(jax.typeof(rows).sharding.spec)
        spec[dimension] = None
        rows = jax.reshard(rows, P(*spec))
        # The gathered copy has no gradient; the device's own rows are written over it with theirs.
        all_rows = jax.lax.all_gather(jax.lax.stop_gradient(rows), axes, axis=dimension, tiled=True)
        first = jax.lax.axis_index(axes) * rows.shape[dimension]
        return jax.lax.dynamic_update_slice_in_dim(all_rows, rows, first, dimension)

    return jax.tree.map(one, tree) if axes else tree


@jax.named_scope("collectives")
def sum_over(tree: Any, axes: Axes) -> Any:
    """Sum arrays over all devices along the given axes, in float32; arrays in host memory are summed layer by layer."""

    def one(part: Array) -> Array:
        # In bfloat16 the sum over many devices would drop small gradients.
        total = jax.lax.psum(to_device(part).astype(jnp.float32), axes)
        return put_like(total.astype(part.dtype), part)

    def whole(part: Array) -> Array:
        return jax.lax.map(one, part) if is_on_host(part) else one(part)

    return jax.tree.map(whole, tree) if axes else tree
