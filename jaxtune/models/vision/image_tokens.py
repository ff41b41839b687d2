"""The tower's outputs at the image tokens of the decoder.

Shape letters: b rows of the batch, s positions in a row, m image tokens of a row, d features of the residual stream.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxtune.parallel.layout import P, by_token


class ImageTokens(NamedTuple):
    """The images of a batch in the decoder.

    Attributes:
        place: for each token, which of the image embeddings of the row replaces its own; -1: none.
        embeddings: the embeddings of image tokens.
        added: what is added to image tokens after each of the decoder's first layers.
    """

    place: Int[Array, "b s"]
    embeddings: Float[Array, "b m d"]
    added: tuple[Float[Array, "b m d"], ...]

    def replace(self, x: Float[Array, "b s d"]) -> Float[Array, "b s d"]:
        """Return the embeddings of all tokens: an image's embeddings at its tokens, and `x` elsewhere."""
        out = jax.typeof(x).sharding.spec
        is_image = jax.reshard(self.place >= 0, P(*out[:2]))[..., None]
        return jnp.where(is_image, jax.reshard(self._at_tokens(self.embeddings), out), x)

    def add(self, x: Float[Array, "b s d"], layer: int) -> Float[Array, "b s d"]:
        """Return the output of a layer of the decoder with what is added after it."""
        if layer >= len(self.added):
            return x
        return x + jax.reshard(self._at_tokens(self.added[layer]), jax.typeof(x).sharding.spec)

    def _at_tokens(self, features: Float[Array, "b m d"]) -> Float[Array, "b s d"]:
        """Return the feature of each image token, and 0 at the other tokens."""

        def gather(features, place):
            outside = jnp.where(place < 0, features.shape[1], place)  # negative numbers would count from the end
            return jax.vmap(lambda row, at: row.at[at].get(mode="fill", fill_value=0))(features, outside)

        whole_rows = P(by_token()[0], None, None)
        on_devices = jax.shard_map(gather, in_specs=(whole_rows, by_token()), out_specs=by_token(None))
        return on_devices(jax.reshard(features, whole_rows), jax.reshard(self.place, by_token()))
