"""Packed rows of documents with images, made by hand, and the same documents for transformers.

Patches are random: a tower does not know what they show.
"""

from itertools import pairwise
from typing import NamedTuple

import numpy as np
from batches import columns_of
from tiny import VOCABULARY

from jaxtune.columns import image_columns
from jaxtune.image_layout import ImageLayout
from jaxtune.models.structure.model_spec import Vision


class Seen(NamedTuple):
    """An image: rows and columns of patches, and the patches (rows * columns, values) in the order of the layout."""

    grid: tuple[int, int]
    patches: np.ndarray


class Sample(NamedTuple):
    """A document: its tokens, with as many image tokens as its images have blocks of patches."""

    tokens: np.ndarray
    images: tuple[Seen, ...]


def draw_sample(vision: Vision, length: int, grids: list[tuple[int, int]], seed: int) -> Sample:
    """Return a document of `length` random tokens, with an image of each grid after every five tokens.

    If other tokens are visual too, they are before and after each image.
    """
    layout, (_, *around) = vision.layout, vision.visual_tokens or (None,)
    before, after = around[:1], around[1:]
    rng = np.random.default_rng(seed)
    texts = rng.choice(np.setdiff1d(np.arange(VOCABULARY), [layout.token, *around]), length)
    images = tuple(Seen(grid, rng.normal(size=(grid[0] * grid[1], layout.patch_values))) for grid in grids)
    parts = []
    for number, image in enumerate(images):
        seen = np.full(len(image.patches) // layout.merge**2, layout.token)
        parts += [texts[5 * number : 5 * number + 5], before, seen, after]
    return Sample(np.concatenate([*parts, texts[5 * len(images) :]]).astype(int), images)


def blocks_of(grid: tuple[int, int], layout: ImageLayout) -> np.ndarray:
    """Return (row, column) of each block of an image, in the order of the layout."""
    rows, columns = (size // layout.merge for size in grid)
    every = np.stack(np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij"), -1).reshape(-1, 2)
    if layout.window is None:
        return every
    window = every // layout.window
    return every[np.lexsort((every[:, 1], every[:, 0], window[:, 1], window[:, 0]))]


def image_batch(samples: list[Sample], layout: ImageLayout, patches: int, length: int) -> dict[str, np.ndarray]:
    """Return the columns of one row (1, ...) with these documents."""
    tokens = np.concatenate([sample.tokens for sample in samples])
    lengths = [len(sample.tokens) for sample in samples]
    batch = columns_of(np.pad(tokens, (0, length - len(tokens)))[None], lengths)
    columns = {}
    for column in image_columns(layout, patches):
        columns[column.name] = np.full(column.shape(1, length), column.padding, column.dtype)
    if layout.rope_axes:
        columns["rope_positions"][:] = batch["positions"][..., None]
    if layout.bidirectional:
        columns["key_end"][0, : len(tokens)] = np.arange(len(tokens)) + 1
    first, start, merge = 0, 0, layout.merge
    inside = np.stack(np.meshgrid(np.arange(merge), np.arange(merge), indexing="ij"), -1).reshape(-1, 2)
    for sample in samples:
        placed = np.flatnonzero(sample.tokens == layout.token)
        moved, done = np.arange(len(sample.tokens))[:, None].repeat(3, 1), 0
        for image in sample.images:
            rows, count = slice(first, first + len(image.patches)), len(image.patches) // merge**2
            blocks = blocks_of(image.grid, layout)
            columns["patches"][0, rows] = image.patches
            columns["patch_positions"][0, rows] = (blocks[:, None] * merge + inside).reshape(-1, 2)
            columns["patch_grid"][0, rows] = image.grid
            columns["patch_start"][0, rows], columns["patch_end"][0, rows] = rows.start, rows.stop
            if layout.window is not None:
                window = (blocks // layout.window) @ [10_000, 1]
                edges = np.flatnonzero(np.diff(window, prepend=-1, append=-1))
                for a, b in pairwise(edges):
                    part = slice(first + a * merge**2, first + b * merge**2)
                    columns["window_start"][0, part], columns["window_end"][0, part] = part.start, part.stop
            at = placed[done : done + count]
            raster = np.lexsort((blocks[:, 1], blocks[:, 0]))
            columns["image_place"][0, start + at] = first // merge**2 + raster
            if layout.bidirectional:
                columns["key_end"][0, start + at] = start + at[-1] + 1
            # As transformers' get_rope_index: text continues after the largest position of the image.
            base = moved[at[0], 0]
            moved[at] = base
            moved[at, 1:] += blocks[raster]
            moved[at[-1] + 1 :] -= count - max(image.grid) // merge
            first, done = rows.stop, done + count
        if layout.rope_axes:
            columns["rope_positions"][0, start : start + len(sample.tokens)] = moved
        start += len(sample.tokens)
    return batch | columns


def torch_inputs(sample: Sample, vision: Vision, dtype) -> dict:
    """Return the document as arguments of a model of transformers, with pixels in a dtype of torch.

    A tower without rotary positions of its decoder cuts the patches from whole images.
    """
    import torch

    layout = vision.layout
    frames = (vision.frames or 1) if layout.rope_axes else 0
    tokens = torch.tensor(sample.tokens)[None]
    inputs = {"input_ids": tokens, "mm_token_type_ids": (tokens == layout.token).int()}
    if vision.visual_tokens:
        inputs["moe_mm_token_type_ids"] = torch.isin(tokens, torch.tensor(vision.visual_tokens)).int()
    if not frames:
        types = inputs.pop("mm_token_type_ids")
        inputs |= {"token_type_ids": types} if layout.bidirectional else {}
    if sample.images and not frames:
        sizes = np.array([image.grid for image in sample.images]) * layout.patch
        pixels = np.zeros((len(sizes), layout.channels, *sizes.max(axis=0)))
        for picture, image, (height, width) in zip(pixels, sample.images, sizes):
            picture[:, :height, :width] = whole_image(image, layout)
        inputs["pixel_values"] = torch.tensor(pixels, dtype=dtype)
        inputs |= {"image_sizes": torch.tensor(sizes)} if layout.side is None else {}
    elif sample.images:
        patches = np.concatenate([in_blocks(image, layout) for image in sample.images])
        patches = patches.reshape(len(patches), layout.channels, 1, layout.patch**2).repeat(frames, 2)
        inputs["pixel_values"] = torch.tensor(patches.reshape(len(patches), -1), dtype=dtype)
        inputs["image_grid_thw"] = torch.tensor([(1, *image.grid) for image in sample.images])
    return inputs


def gemma4_inputs(sample: Sample, vision: Vision, dtype) -> dict:
    """Return the document as arguments of Gemma 4 in transformers, with padded patches in a dtype of torch."""
    import torch

    layout = vision.layout
    tokens = torch.tensor(sample.tokens)[None]
    inputs = {"input_ids": tokens, "mm_token_type_ids": (tokens == layout.token).int()}
    if not sample.images:
        return inputs
    most = max(len(image.patches) for image in sample.images)
    patches = np.zeros((len(sample.images), most, layout.patch_values))
    places = np.full((*patches.shape[:2], 2), -1)  # (column, row); -1: padding
    for image, of_image, its_places in zip(sample.images, patches, places):
        (rows, columns), size = image.grid, layout.patch
        pixels = whole_image(image, layout).reshape(layout.channels, rows, size, columns, size)
        of_image[: rows * columns] = pixels.transpose(1, 3, 2, 4, 0).reshape(rows * columns, -1)
        its_places[: rows * columns] = [(column, row) for row in range(rows) for column in range(columns)]
    pixels = {"pixel_values": torch.tensor(patches, dtype=dtype), "image_position_ids": torch.tensor(places)}
    return inputs | pixels


def whole_image(image: Seen, layout: ImageLayout) -> np.ndarray:
    """Return the pixels of an image (channels, height, width)."""
    (rows, columns), merge, size = image.grid, layout.merge, layout.patch
    blocks = in_blocks(image, layout).reshape(
        rows // merge, columns // merge, merge, merge, layout.channels, size, size
    )
    return blocks.transpose(4, 0, 2, 5, 1, 3, 6).reshape(layout.channels, rows * size, columns * size)


def in_blocks(image: Seen, layout: ImageLayout) -> np.ndarray:
    """Return the patches with blocks in raster order, as image processors of Qwen return them."""
    blocks = blocks_of(image.grid, layout)
    raster = np.lexsort((blocks[:, 1], blocks[:, 0]))
    return image.patches.reshape(len(blocks), -1, image.patches.shape[1])[raster].reshape(image.patches.shape)
