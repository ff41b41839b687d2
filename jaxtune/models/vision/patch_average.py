"""The projector of Gemma's vision towers: an embedding of the decoder is a product of a block's average.

Shape letters: b rows of the batch, p patches of a row, d features of a patch, m image tokens of a row, h features of
the decoder's residual stream.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxtune.models.declared import declare_parameter
from jaxtune.models.forward_options import ForwardOptions
from jaxtune.models.layers.linear import Linear
from jaxtune.models.layers.norm import NormLayer
from jaxtune.models.structure.model_spec import ModelSpec, Vision
from jaxtune.parallel.layout import P, by_token


class PatchAverage(nnx.Module):
    """down(norm(average of a block's patches)), as `Gemma3MultiModalProjector` in transformers.

    Between average and norm may be a factor and a standardization, as in `Gemma4VisionPooler` and `Gemma4VisionModel`.
    """

    def __init__(self, spec: ModelSpec, vision: Vision, name: str):
        self.averaged, self.factor = vision.layout.merge**2, vision.average_factor
        size, of_vision = (vision.hidden,), vision.standardized
        self.shift = declare_parameter(size, (None,), nnx.initializers.zeros, "constant") if of_vision else None
        self.scale = declare_parameter(size, (None,), nnx.initializers.ones, "constant") if of_vision else None
        self.norm = NormLayer(vision.hidden, vision.projector_norm or vision.norm)
        shape = (spec.hidden, vision.hidden)
        self.down = Linear(spec, spec, f"{name}.down", shape, ("embed", None), vision.projector_bias)

    @jax.named_scope("projector")
    def __call__(self, x: Float[Array, "b p d"], call: ForwardOptions) -> Float[Array, "b m h"]:
        """Return an embedding for each block of patches."""
        shape = (len(x), x.shape[1] // self.averaged, self.averaged, x.shape[2])
        blocks = jnp.reshape(x, shape, out_sharding=by_token(None, None))
        averages = jnp.mean(blocks, axis=2, dtype=jnp.float32).astype(x.dtype)
        return self.down(self.norm(self._standardized(averages)), call)

    def _standardized(self, averages: Float[Array, "b m d"]) -> Float[Array, "b m d"]:
        """Return (factor * averages - shift) * scale, computed in float32 and rounded once."""
        y = averages.astype(jnp.float32) * self.factor
        if self.shift is not None and self.scale is not None:
            shift, scale = (
                jax.reshard(one.get_value().astype(jnp.float32), P(None)) for one in (self.shift, self.scale)
            )
            y = (y - shift) * scale
        return y.astype(averages.dtype)
