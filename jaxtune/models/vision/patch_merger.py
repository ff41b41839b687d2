"""The projector of a vision tower: blocks of neighbouring patches become embeddings of the decoder.

Shape letters: b rows of the batch, p patches of a row, d features of a patch, m image tokens of a row, h features of
the decoder's residual stream.
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


class PatchMerger(nnx.Module):
    """down(gelu(up(x))) of a block's patches in one vector; the norm is before they are joined, or after.

    With `Vision.joined_projection` it is down(gelu(up(merge(x)))).
    """

    def __init__(self, spec: ModelSpec, vision: Vision, name: str, late_norm: bool = False):
        self.joined = vision.layout.merge**2
        width, bias = vision.hidden * self.joined, vision.projector_bias
        self.late_norm = late_norm
        self.norm = NormLayer(width if late_norm else vision.hidden, vision.projector_norm or vision.norm)
        shape = (vision.hidden, width)
        self.merge = Linear(spec, spec, f"{name}.merge", shape, ("embed", None)) if vision.joined_projection else None
        in_features = vision.hidden if vision.joined_projection else width
        self.up = Linear(spec, spec, f"{name}.up", (vision.projected, in_features), ("mlp", "embed"), bias)
        self.down = Linear(spec, spec, f"{name}.down", (spec.hidden, vision.projected), ("embed", "mlp"), bias)

    @jax.named_scope("projector")
    def __call__(self, x: Float[Array, "b p d"], call: ForwardOptions) -> Float[Array, "b m h"]:
        """Return an embedding for each block of patches."""
        x = x if self.late_norm else self.norm(x)
        rows, tokens, features = len(x), x.shape[1] // self.joined, x.shape[2]
        if self.merge is not None:  # a feature's values side by side, as torch.nn.functional.unfold has them
            blocks = jnp.reshape(x, (rows, tokens, self.joined, features), out_sharding=by_token(None, None))
            x = jnp.swapaxes(blocks, 2, 3)
        x = jnp.reshape(x, (rows, tokens, features * self.joined), out_sharding=by_token(None))
        x = x if self.merge is None else self.merge(x, call)
        x = self.norm(x) if self.late_norm else x
        return self.down(ACTIVATIONS["gelu"](self.up(x, call)), call)
