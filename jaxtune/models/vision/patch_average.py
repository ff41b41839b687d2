"""The projector of Gemma 3's vision tower: an embedding of the decoder is a product of a block's average.

Shape letters: b rows of the batch, p patches of a row, d features of a patch, m image tokens of a row, h features of
the decoder's residual stream.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxtune.models.forward_options import ForwardOptions
from jaxtune.models.layers.linear import Linear
from jaxtune.models.layers.norm import NormLayer
from jaxtune.models.structure.model_spec import ModelSpec, Vision
from jaxtune.parallel.layout import by_token


class PatchAverage(nnx.Module):
    """down(norm(average of a block's patches)), as `Gemma3MultiModalProjector` in transformers."""

    def __init__(self, spec: ModelSpec, vision: Vision, name: str):
        self.averaged = vision.layout.merge**2
        self.norm = NormLayer(vision.hidden, vision.projector_norm or vision.norm)
        shape = (spec.hidden, vision.hidden)
        self.down = Linear(spec, spec, f"{name}.down", shape, ("embed", None), vision.projector_bias)

    @jax.named_scope("projector")
    def __call__(self, x: Float[Array, "b p d"], call: ForwardOptions) -> Float[Array, "b m h"]:
        """Return an embedding for each block of patches."""
        shape = (len(x), x.shape[1] // self.averaged, self.averaged, x.shape[2])
        blocks = jnp.reshape(x, shape, out_sharding=by_token(None, None))
        return self.down(self.norm(jnp.mean(blocks, axis=2, dtype=jnp.float32).astype(x.dtype)), call)
