"""The first part of a vision tower: embeddings of patches, and of their positions in the image.

Shape letters: b rows of the batch, p patches of a row, d features of a patch's residual stream, v values of a patch.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxtune.models.declared import declare_parameter
from jaxtune.models.forward_options import ForwardOptions
from jaxtune.models.layers.linear import Linear
from jaxtune.models.layers.lookup import lookup
from jaxtune.models.structure.model_spec import ModelSpec, Vision
from jaxtune.parallel.layout import P, by_token


class PatchEmbedding(nnx.Module):
    """A convolution whose stride is its kernel's size, which is a product with each patch."""

    def __init__(self, spec: ModelSpec, vision: Vision):
        layout, init = vision.layout, nnx.initializers.normal(vision.initializer_range)
        frames = () if vision.frames is None else (vision.frames,)
        shape = (vision.hidden, layout.channels, *frames, layout.patch, layout.patch)
        if vision.flat_kernel:
            shape = (vision.hidden, layout.patch_values)
        self.kernel = declare_parameter(shape, ("embed", *(None,) * (len(shape) - 1)), init, "convolution")
        zeros = nnx.initializers.zeros
        self.bias = declare_parameter((vision.hidden,), (None,), zeros, "vector") if vision.patch_bias else None
        self.frames = vision.frames

    def __call__(self, patches: Float[Array, "b p v"], call: ForwardOptions) -> Float[Array, "b p d"]:
        """Return the embeddings of patches in the compute dtype."""
        dtype = call.dtype
        kernel = jax.reshard(self.kernel.astype(dtype), P())
        if self.frames is not None:  # all frames of an image are equal
            kernel = jnp.sum(kernel, axis=2, dtype=jnp.float32).astype(dtype)
        kernel = kernel.reshape(len(kernel), -1)
        y = jnp.einsum("bpv,dv->bpd", patches.astype(dtype), kernel, preferred_element_type=jnp.float32)
        return (y if self.bias is None else y + jax.reshard(self.bias.astype(jnp.float32), P())).astype(dtype)


class PatchMatrix(nnx.Module):
    """A linear layer of the values of a patch, moved from [0, 1] to [-1, 1]: `Gemma4VisionPatchEmbedder`."""

    def __init__(self, spec: ModelSpec, vision: Vision):
        layout = vision.layout
        self.shape = (layout.channels, layout.patch**2)
        self.linear = Linear(spec, spec, "vision.patches.linear", (vision.hidden, layout.patch_values), ("embed", None))

    def __call__(self, patches: Float[Array, "b p v"], call: ForwardOptions) -> Float[Array, "b p d"]:
        """Return the embeddings of patches in the compute dtype."""
        by_pixel = jnp.swapaxes(patches.reshape(*patches.shape[:2], *self.shape), 2, 3).reshape(patches.shape)
        return self.linear((2 * by_pixel - 1).astype(call.dtype), call)


class AxisEmbedding(nnx.Module):
    """Learned embeddings of rows and of columns, which are added."""

    def __init__(self, vision: Vision):
        shape = (2, vision.positions, vision.hidden)
        self.weight = declare_parameter(shape, (None, None, "embed"), nnx.initializers.ones, "position")

    def __call__(
        self, positions: Int[Array, "b p 2"], grid: Int[Array, "b p 2"], dtype: jnp.dtype
    ) -> Float[Array, "b p d"]:
        """Return the embeddings of patches at these rows and columns; `grid` has no effect."""
        of_columns, of_rows = jax.reshard(self.weight.astype(dtype), P(None, None, None))
        row, column = (jax.reshard(positions[..., axis], by_token()) for axis in (0, 1))
        return lookup(of_columns, column) + lookup(of_rows, row)


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
