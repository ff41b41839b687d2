"""Images in a row: the columns of patches, and the columns of tokens that depend on images."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from jaxtune.columns import IMAGE_PLACE, KEY_END, ROPE_POSITIONS
from jaxtune.data.images.image_reader import ImageReader
from jaxtune.errors import UserError, format_count
from jaxtune.image_layout import ImageLayout, ImageRef, order_blocks, patch_positions


def put_patches(row: dict[str, np.ndarray], images: Sequence[ImageRef], first: int, reader: ImageReader) -> None:
    """Read the images of a document, and write the columns of their patches into a row; `first`: the first patch.

    Raises UserError if an image cannot be read.
    """
    layout = reader.layout
    for image in images:
        end = first + image.patches
        whole = slice(first, end)
        row["patches"][whole] = reader.read_patches(image)
        row["patch_positions"][whole] = patch_positions(image.grid, layout)
        row["patch_grid"][whole] = image.grid
        row["patch_start"][whole], row["patch_end"][whole] = first, end
        if layout.window is not None:
            sizes = order_blocks(image.grid, layout)[1] * layout.merge**2
            ends = first + np.cumsum(sizes)
            row["window_start"][whole] = np.repeat(ends - sizes, sizes)
            row["window_end"][whole] = np.repeat(ends, sizes)
        first = end


def put_image_tokens(
    row: dict[str, np.ndarray],
    begin: int,
    tokens: Int[np.ndarray, " n"],
    images: Sequence[ImageRef],
    first: int,
    layout: ImageLayout | None,
) -> None:
    """Write the columns of a document's tokens that depend on its images into a row.

    Args:
        row: the row.
        begin: position of the document's first token.
        tokens: the document's tokens in the row.
        images: the document's images.
        first: the first patch of the first image.
        layout: the layout of images; None: there are none.

    Raises:
        UserError: the document has more image tokens than its images have embeddings, or fewer.
    """
    whole = slice(begin, begin + len(tokens))
    positions = np.arange(len(tokens))  # rotary positions along time
    beyond = np.zeros((len(tokens), 3), np.int32)  # how far those along each axis are beyond them
    key_end = positions + begin + 1
    if layout is not None and images:
        block, taken = layout.merge**2, 0
        image_tokens = np.flatnonzero(tokens == layout.token)
        embeddings = sum(image.patches for image in images) // block
        if len(image_tokens) != embeddings:
            made = format_count(embeddings, "embedding")
            raise UserError(f"{format_count(len(image_tokens), 'image token')}, but the images become {made}")
        for image in images:
            of_image = image_tokens[taken : (taken := taken + image.patches // block)]
            rows, columns = (side // layout.merge for side in image.grid)
            # Tokens have the order of the blocks row by row; embeddings are in the order of patches.
            row[IMAGE_PLACE.name][begin + of_image] = first // block + np.argsort(order_blocks(image.grid, layout)[0])
            first += image.patches
            end = of_image[-1] + 1
            key_end[of_image] = begin + end
            # An image takes as many positions as its longer side has blocks: as `get_rope_index` in transformers.
            positions[of_image] = positions[of_image[0]]
            positions[end:] -= len(of_image) - max(rows, columns)
            beyond[of_image, 1], beyond[of_image, 2] = np.divmod(np.arange(len(of_image)), columns)
    if ROPE_POSITIONS.name in row:
        row[ROPE_POSITIONS.name][whole] = positions[:, None] + beyond
    if KEY_END.name in row:
        row[KEY_END.name][whole] = key_end
