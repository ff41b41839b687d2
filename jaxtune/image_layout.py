"""How a model sees an image: patches, and the tokens that they become."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from jaxtyping import Int


@dataclass(frozen=True)
class ImageLayout:
    """The layout of an image in a row, by which data are prepared for a vision tower.

    An image is cut to patches. merge x merge neighbours become one embedding, which replaces an image token's.
    So the patches of an image come in blocks of merge * merge, row by row inside a block, and the blocks row by row;
    with windows, the blocks of a window are adjacent, and windows come row by row.

    Attributes:
        patch: pixels of a patch's side.
        merge: patches of the side of a block that becomes one embedding.
        token: the number of the image token.
        window: blocks of the side of an attention window of the tower (Qwen2.5-VL); None: it has no windows.
        rope_axes: whether the decoder's rotary positions have three axes: time, height, width (M-RoPE, Qwen2-VL).
        bidirectional: whether the tokens of an image see each other in the decoder (Gemma 3 and 4).
        channels: colours of a pixel.
        side: rows, and columns, of patches of every image; None: images differ in size.
        longest: the most rows, or columns, of patches that the tower has positions for; None: any number.
    """

    patch: int
    merge: int
    token: int
    window: int | None = None
    rope_axes: bool = False
    bidirectional: bool = False
    channels: int = 3
    side: int | None = None
    longest: int | None = None

    @property
    def patch_values(self) -> int:
        """The number of values of a patch."""
        return self.channels * self.patch**2


@dataclass(frozen=True)
class ImageRef:
    """An image of a document: where it is, and its size after preprocessing.

    Attributes:
        place: how the reader of images finds it again.
        grid: rows and columns of patches, multiples of the layout's `merge`.
    """

    place: str
    grid: tuple[int, int]

    @property
    def patches(self) -> int:
        """The number of patches."""
        return self.grid[0] * self.grid[1]


@lru_cache(256)
def order_blocks(grid: tuple[int, int], layout: ImageLayout) -> tuple[Int[np.ndarray, " n"], Int[np.ndarray, " w"]]:
    """Return the blocks of an image in the order of its patches, and the number of blocks of each window.

    A block has its number row by row over the image. Without windows the image counts as one.
    """
    rows, columns = (side // layout.merge for side in grid)
    if layout.window is None:
        return np.arange(rows * columns), np.array([rows * columns])
    windows_of_a_row = -(-columns // layout.window)
    window = np.arange(rows)[:, None] // layout.window * windows_of_a_row + np.arange(columns) // layout.window
    return np.argsort(window.ravel(), kind="stable"), np.bincount(window.ravel())


@lru_cache(256)
def patch_positions(grid: tuple[int, int], layout: ImageLayout) -> Int[np.ndarray, "n 2"]:
    """Return row and column of each patch of an image, in the order of its patches."""
    block_rows, block_columns = np.divmod(order_blocks(grid, layout)[0], grid[1] // layout.merge)
    inside = np.indices((layout.merge, layout.merge)).reshape(2, -1)  # rows and columns in a block
    corners = np.stack([block_rows, block_columns]) * layout.merge
    return (corners[:, :, None] + inside[:, None]).reshape(2, -1).T
