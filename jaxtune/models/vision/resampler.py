"""The projector of ERNIE 4.5 VL's vision tower, which joins patches in space and then frames in time.

Shape letters: b rows of the batch, p patches of a row, d features of a patch, m image tokens of a row, h features of
the decoder's residual stream, w features of a block's patches together.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxtune.models.forward_options import ForwardOptions
from jaxtune.models.layers.linear import Linear
from jaxtune.models.layers.mlp import ACTIVATIONS
from jaxtune.models.layers.norm import NormLayer
from jaxtune.models.structure.model_spec import ModelSpec, Vision
from jaxtune.parallel.layout import by_token


class JoinedParts(nnx.Module):
    """norm(down(gelu(up(x)))) of parts in one vector, as `Ernie4_5_VLMoeVisionMLP` in transformers."""

    def __init__(self, spec: ModelSpec, vision: Vision, name: str, joined: int):
        width = vision.projected
        self.up = Linear(spec, spec, f"{name}.up", (width, joined), ("mlp", "embed"), bias=True)
        self.down = Linear(spec, spec, f"{name}.down", (width, width), ("embed", "mlp"), bias=True)
        self.norm = NormLayer(width, vision.norm)

    def __call__(self, x: Float[Array, "b m joined"], call: ForwardOptions) -> Float[Array, "b m w"]:
        """Return the joined parts."""
        return self.norm(self.down(ACTIVATIONS["gelu"](self.up(x, call)), call))


class Resampler(nnx.Module):
    """norm(out(time(space(x)))), as `Ernie4_5_VLMoeVariableResolutionResamplerModel` in transformers.

    Two frames are joined in time; both frames of an image are the image itself.
    """

    def __init__(self, spec: ModelSpec, vision: Vision, name: str):
        self.joined, width = vision.layout.merge**2, vision.projected
        self.space = JoinedParts(spec, vision, f"{name}.space", vision.hidden * self.joined)
        self.time = JoinedParts(spec, vision, f"{name}.time", 2 * width)
        self.out = Linear(spec, spec, f"{name}.out", (spec.hidden, width), ("embed", None), bias=True)
        self.norm = NormLayer(spec.hidden, vision.projector_norm or vision.norm)

    @jax.named_scope("projector")
    def __call__(self, x: Float[Array, "b p d"], call: ForwardOptions) -> Float[Array, "b m h"]:
        """Return an embedding for each block of patches."""
        shape = (len(x), x.shape[1] // self.joined, x.shape[2] * self.joined)
        frame = self.space(jnp.reshape(x, shape, out_sharding=by_token(None)), call)
        return self.norm(self.out(self.time(jnp.concatenate([frame, frame], axis=-1), call), call))
