"""The cache of one layer in decoding, inside the arrays of its stack."""

from typing import Any, NamedTuple

import jax
from jaxtyping import Array, Int


class CacheSlot(NamedTuple):
    """A layer's cache, as a place in the arrays of all repeats of the layer, which a loop updates in place.

    Attributes:
        stacked: arrays with a leading axis of repeats, such as the keys and values of `decode.empty_cache`.
        place: the layer's repeat.
    """

    stacked: Any
    place: Int[Array, ""]

    def part(self, number: int) -> "CacheSlot":
        """Return the slot of one of several caches of a layer."""
        return CacheSlot(self.stacked[number], self.place)

    def read(self) -> Any:
        """Return the layer's own cache, without the axis of repeats."""
        return jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, self.place, keepdims=False), self.stacked)

    def write(self, cache: Any) -> Any:
        """Return the arrays of all repeats with this cache as the layer's."""
        return jax.tree.map(
            lambda leaf, own: jax.lax.dynamic_update_index_in_dim(leaf, own, self.place, 0), self.stacked, cache
        )
