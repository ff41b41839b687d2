"""The images of prompts that are continued together, as the columns that a vision tower and the decoder read."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int32

from jaxtune.columns import image_columns
from jaxtune.data.images.image_reader import ImageReader
from jaxtune.data.rows.row_images import put_image_tokens, put_patches
from jaxtune.image_layout import ImageLayout, ImageRef

# Image tokens of a row are padded to a multiple of this or, if that is more, of an eighth of their number rounded up to
# a power of two, so that few sizes are compiled.
BUCKET = 64


def padded_patches(patches: int, layout: ImageLayout) -> int:
    """Return the number of patches of each row, for the most that a prompt has."""
    block = layout.merge**2
    bucket = max(BUCKET, 2 ** (patches // block).bit_length() // 8)
    return -(-patches // (bucket * block)) * bucket * block


@dataclass(frozen=True)
class PromptImages:
    """Images of prompts.

    Attributes:
        reader: reads their patches.
        of_prompts: the images of each prompt, in the order of their tokens; rows past them have none.
    """

    reader: ImageReader
    of_prompts: Sequence[tuple[ImageRef, ...]]

    def columns(self, tokens: Int32[np.ndarray, "b s"], start: Int32[np.ndarray, " b"]) -> dict[str, np.ndarray]:
        """Read the images; return the columns of `columns.image_columns` of prompts that are padded on the left.

        Raises:
            UserError: an image cannot be read, or a prompt has another number of image tokens than its images.
        """
        layout = self.reader.layout
        most = max(sum(image.patches for image in images) for images in self.of_prompts)
        declared = image_columns(layout, padded_patches(most, layout))
        columns = {one.name: np.full(one.shape(*tokens.shape), one.padding, one.dtype) for one in declared}
        for number, first in enumerate(start):
            images = self.of_prompts[number] if number < len(self.of_prompts) else ()
            row = {name: column[number] for name, column in columns.items()}
            put_patches(row, images, 0, self.reader)
            put_image_tokens(row, int(first), tokens[number, first:], images, 0, layout)
        return columns
