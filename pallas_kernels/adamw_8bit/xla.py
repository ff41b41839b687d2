"""The update in plain XLA, one layer after another in place, so that float32 temporaries have the size of a layer."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.adamw_8bit import reference
from pallas_kernels.adamw_8bit.adam import Adam, AdamStep, Updated


def update(gradient: Float[Array, "l o i"], before: Updated, step: AdamStep, adam: Adam) -> Updated:
    """Return the parameter and the moments after a step; see `adamw_8bit`."""

    def body(layer: Array, stack: Updated) -> Updated:
        def slice_layer(leaf: Array) -> Array:
            return jax.lax.dynamic_slice_in_dim(leaf, layer, 1)

        origin = step.origin + jnp.array([1, 0, 0], jnp.uint32) * layer.astype(jnp.uint32)
        layer_step = step._replace(rate=slice_layer(step.rate), decay=slice_layer(step.decay), origin=origin)
        after = reference.update(slice_layer(gradient), jax.tree.map(slice_layer, stack), layer_step, adam)
        return jax.tree.map(lambda leaf, new: jax.lax.dynamic_update_slice_in_dim(leaf, new, layer, 0), stack, after)

    return jax.lax.fori_loop(0, len(gradient), body, before)
