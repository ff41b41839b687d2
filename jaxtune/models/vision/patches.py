"""The first part of a vision tower: embeddings of patches, and of their positions in the image.

Shape letters: b rows of the batch, p patches of a row, d features of a patch's residual stream, v values of a patch.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxtune.models.declared import declare_parameter
from jaxtune.models.layers.lookup import lookup
from jaxtune.models.structure.model_spec import Vision
from jaxtune.parallel.layout import P, by_token


class PatchEmbedding(nnx.Module):
    """A convolution whose stride is its kernel's size, which is a product with each patch."""

    def __init__(self, vision: Vision):
        layout, init = vision.layout, nnx.initializers.normal(vision.initializer_range)
        frames = () if vision.frames is None else (vision.frames,)
        shape = (vision.hidden, layout.channels, *frames, layout.patch, layout.patch)
        if vision.flat_kernel:
            shape = (vision.hidden, layout.patch_values)
        self.kernel = declare_parameter(shape, ("embed", *(None,) * (len(shape) - 1)), init, "convolution")
        zeros = nnx.initializers.zeros
        self.bias = declare_parameter((vision.hidden,), (None,), zeros, "vector") if vision.patch_bias else None
        self.frames = vision.frames

    def __call__(self, patches: Float[Array, "b p v"], dtype: jnp.dtype) -> Float[Array, "b p d"]:
        """Return the embeddings of patches in `dtype`."""
        kernel = jax.reshard(self.kernel.astype(dtype), P())
        if self.frames is not None:  # all frames of an image are equal
            kernel = jnp.sum(kernel, axis=2, dtype=jnp.float32).astype(dtype)
        kernel = kernel.reshape(len(kernel), -1)
        y = jnp.einsum("bpv,dv->bpd", patches.astype(dtype), kernel, preferred_element_type=jnp.float32)
        return (y if self.bias is None else y + jax.reshard(self.bias.astype(jnp.float32), P())).astype(dtype)


class PositionEmbedding(nnx.Module):
    """Learned embeddings of a square grid of positions, interpolated to the grid of each image.

    Bilinear with aligned corners, as transformers' `get_vision_interpolation_indices_and_weights`.
    """

    def __init__(self, vision: Vision):
        shape, init = (vision.positions**2, vision.hidden), nnx.initializers.normal(vision.initializer_range)
        self.weight = declare_parameter(shape, (None, "embed"), init, "position")
        self.side = vision.positions

    def __call__(
        self, positions: Int[Array, "b p 2"], grid: Int[Array, "b p 2"], dtype: jnp.dtype
    ) -> Float[Array, "b p d"]:
        """Return the embeddings of patches at these rows and columns of grids with `grid` rows and columns."""
        table = jax.reshard(self.weight.astype(dtype), P(None, None))
        at = positions.astype(jnp.float32) * (self.side - 1) / jnp.maximum(grid - 1, 1)
        low = jnp.floor(at)
        share = (at - low)[..., None]  # of the next row and column
        low = low.astype(jnp.int32)
        high = jnp.minimum(low + 1, self.side - 1)
        total = jnp.zeros((), jnp.float32)
        for row, of_row in ((low, 1 - share), (high, share)):
            for column, of_column in ((low, 1 - share), (high, share)):
                taken = lookup(table, jax.reshard(row[..., 0] * self.side + column[..., 1], by_token()))
                total += taken.astype(jnp.float32) * (of_row[..., 0, :] * of_column[..., 1, :])
        return total.astype(dtype)
