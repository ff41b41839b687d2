"""The update by XLA alone, layer after layer in place: float32 temporaries are of one layer."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.adamw_8bit import reference
from pallas_kernels.adamw_8bit.adam import Adam, Step, Updated


def update(gradient: Float[Array, "l o i"], before: Updated, step: Step, adam: Adam) -> Updated:
    """The parameter and the moments after a step; see `adamw_8bit`."""

    def body(layer: Array, stack: Updated) -> Updated:
        def own(leaf: Array) -> Array:
            return jax.lax.dynamic_slice_in_dim(leaf, layer, 1)

        origin = step.origin + jnp.array([1, 0, 0], jnp.uint32) * layer.astype(jnp.uint32)
        here = step._replace(rate=own(step.rate), decay=own(step.decay), origin=origin)
        after = reference.update(own(gradient), jax.tree.map(own, stack), here, adam)
        return jax.tree.map(lambda leaf, new: jax.lax.dynamic_update_slice_in_dim(leaf, new, layer, 0), stack, after)

    return jax.lax.fori_loop(0, len(gradient), body, before)
