"""The vision tower: a transformer over the patches of packed images, and its projector.

The images of a row are packed as documents are: a patch sees its whole image, or a window.

Shape letters: b rows of the batch, p patches of a row.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx
from jaxtyping import Array

from jaxtune.models.forward_options import ForwardOptions
from jaxtune.models.layers.attend import attend_packed
from jaxtune.models.layers.attention import Attend, Inputs
from jaxtune.models.layers.norm import NormLayer
from jaxtune.models.layers.rope import rotation
from jaxtune.models.stack import Stack
from jaxtune.models.structure.mixers import Heads
from jaxtune.models.structure.model_spec import ModelSpec
from jaxtune.models.vision.image_tokens import ImageTokens
from jaxtune.models.vision.patch_average import PatchAverage
from jaxtune.models.vision.patch_merger import PatchMerger
from jaxtune.models.vision.patches import AxisEmbedding, PatchEmbedding, PatchMatrix, PositionEmbedding
from jaxtune.models.vision.resampler import Resampler
from jaxtune.parallel.layout import by_residual, by_token

NO_KEY_END = ("cudnn", "fa3", "flash")  # attention.backend of kernels without an end of keys for each query


class Tower(nnx.Module):
    """A vision tower and its projectors, from the columns of `columns.image_columns`."""

    def __init__(self, spec: ModelSpec):
        vision = spec.vision
        assert vision is not None, "the model has no vision tower"
        self.vision, self.start = vision, spec.tower_start
        self.patches = (PatchMatrix if vision.patch_matrix else PatchEmbedding)(spec, vision)
        of_positions = AxisEmbedding if vision.position_axes else PositionEmbedding
        self.positions = of_positions(vision) if vision.positions else None
        self.input_norm = NormLayer(vision.hidden, vision.norm) if vision.input_norm else None
        self.stacks = nnx.List([Stack(spec, stack) for stack in spec.tower_stacks])
        self.output_norm = NormLayer(vision.hidden, vision.norm) if vision.output_norm else None
        projector = Resampler if vision.resampled else PatchMerger if vision.projected else PatchAverage
        self.projector = projector(spec, vision, "vision.projector")
        self.deepstack = nnx.List(
            [
                PatchMerger(spec, vision, f"vision.deepstack.{number}", late_norm=True)
                for number in range(len(vision.deepstack))
            ]
        )

    @jax.named_scope("vision")
    def __call__(self, batch: Mapping[str, Array], call: ForwardOptions) -> ImageTokens:
        """Return the images of a micro-batch as the decoder sees them.

        batch: patches (b, p, values of a patch); patch_positions and patch_grid (b, p, 2), of rows and columns;
        patch_start, patch_end and, if the tower has windows, window_start, window_end (b, p), the first patch that a
        patch sees and the one after the last; image_place (b, s), of the s tokens of a row.

        A kernel that attention.backend names for the decoder, but that cannot see later patches, is not used here.
        """
        columns = {
            name: jax.reshard(column, by_token(*(None,) * (column.ndim - 2)))
            for name, column in batch.items()
            if name.startswith(("patch", "window_"))
        }
        # The bound of `documents` is of texts, and a tower is trained without dropout.
        call = call._replace(documents=None, hidden_dropout=0.0, attention_dropout=0.0, dropout_layers=None)
        if call.backend in NO_KEY_END:
            call = call._replace(backend="auto")
        x = self.patches(columns["patches"], call)
        if self.positions is not None:
            x += self.positions(columns["patch_positions"], columns["patch_grid"], call.dtype)
        if self.input_norm is not None:
            x = self.input_norm(x)
        x, inputs, added = jax.reshard(x, by_residual()), self._inputs(columns, call), []
        ends = {self.start + number + 1 for number in self.vision.deepstack}
        for stack in self.stacks:
            x, _, _ = stack(x, inputs, None, call)
            if stack.stack.end in ends:
                added.append(self.deepstack[len(added)](jax.reshard(x, by_token(None)), call))
        if self.output_norm is not None:
            x = self.output_norm(x)
        return ImageTokens(batch["image_place"], self.projector(jax.reshard(x, by_token(None)), call), tuple(added))

    def _inputs(self, columns: Mapping[str, Array], call: ForwardOptions) -> Inputs:
        """Return the inputs that all layers of the tower share."""
        mixers = dict.fromkeys(mixer for layer in self.vision.layers for mixer in layer.mixers)
        ropes = dict.fromkeys((one.rope, one.rope_dim) for one in mixers if isinstance(one, Heads) and one.rope)
        rotations = {(rope, width): rotation(rope, width, columns["patch_positions"]) for rope, width in ropes}
        ends = columns["patch_end"]
        attend = attend_packed(columns["patch_start"], call, key_end=ends)
        if "window_start" in columns:
            windows = attend_packed(columns["window_start"], call, key_end=columns["window_end"])
            attend = _by_window(attend, windows)
        # No layer of a tower reads `positions`, which only recurrences and convolutions do: any (b, p) would serve.
        return Inputs(rotations, attend, columns["patch_start"], ends > columns["patch_start"])


def _by_window(whole: Attend, windows: Attend) -> Attend:
    """Return attention within windows for the layers that have one, and within images for the others."""

    def attend(q: Array, k: Any, v: Any, mixer: Heads, sinks: Any, cache: Any, call: ForwardOptions) -> Any:
        if mixer.window is None:
            return whole(q, k, v, mixer, sinks, cache, call)
        return windows(q, k, v, dataclasses.replace(mixer, window=None), sinks, cache, call)

    return attend
