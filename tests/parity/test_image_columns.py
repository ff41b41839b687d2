"""The columns of images against transformers: rotary positions, windows of patches, and the keys that tokens see."""

from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import numpy as np
import pytest
import torch
from transformers import Gemma3TextConfig
from transformers.models.ernie4_5_vl_moe.modeling_ernie4_5_vl_moe import Ernie4_5_VLMoeModel
from transformers.models.gemma3.modeling_gemma3 import create_masks_for_vision_model, get_block_sequence_ids_for_mask
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5Model
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel
from transformers.vision_utils import get_vision_position_ids, get_vision_window_index

from jaxtune.columns import image_columns
from jaxtune.data.rows.row_images import put_image_tokens, put_patches
from jaxtune.image_layout import ImageLayout, ImageRef

TOKEN, LENGTH, PATCHES = 5, 96, 512
# Texts of some length, and images of (rows, columns) of blocks, which a text follows.
DOCUMENTS = {
    "text": [9],
    "wide": [3, (2, 5), 4],
    "first": [(4, 1), 2],
    "last": [5, (3, 3)],
    "several": [2, (1, 1), 1, (6, 2), 3, (2, 7), 2],
}


class Reader(NamedTuple):
    """Makes patches without reading."""

    layout: ImageLayout

    def read_patches(self, ref):
        return np.zeros((ref.patches, self.layout.patch_values))


def build(parts, layout, begin=0, first=0):
    """Return the image columns of a row that has one document, and the tokens and images of the document."""
    tokens = np.concatenate([np.full(np.prod(part), TOKEN if isinstance(part, tuple) else 1) for part in parts])
    grids = [(part[0] * layout.merge, part[1] * layout.merge) for part in parts if isinstance(part, tuple)]
    images = [ImageRef(str(number), grid) for number, grid in enumerate(grids)]
    columns = image_columns(layout, PATCHES)
    row = {column.name: np.full(column.shape(LENGTH), column.padding, column.dtype) for column in columns}
    put_image_tokens(row, begin, tokens, images, first, layout)
    put_patches(row, images, first, cast(Any, Reader(layout)))
    return row, tokens, images


def thw(images):
    return torch.tensor([(1, *image.grid) for image in images]) if images else None


@pytest.mark.parametrize("model", [Qwen2_5_VLModel, Qwen3VLModel, Qwen3_5Model, Ernie4_5_VLMoeModel])
@pytest.mark.parametrize("parts", DOCUMENTS.values(), ids=DOCUMENTS)
def test_rotary_positions_are_those_of_get_rope_index(model, parts):
    """Positions begin at 0 in each document, wherever it begins in the row."""
    row, tokens, images = build(parts, ImageLayout(2, 2, TOKEN, rope_axes=True), begin=7)
    vision = SimpleNamespace(spatial_merge_size=2, tokens_per_second=2, temporal_merge_size=2)
    config = SimpleNamespace(vision_config=vision)
    alone = SimpleNamespace(
        config=config,
        get_vision_position_ids=lambda *args, **named: model.get_vision_position_ids(None, *args, **named),
    )
    ids = torch.from_numpy(tokens)[None]
    expected, _ = model.get_rope_index(alone, ids, (ids == TOKEN).int(), image_grid_thw=thw(images))
    assert np.array_equal(row["rope_positions"][7 : 7 + len(tokens)].T, expected[:, 0].numpy())


@pytest.mark.parametrize("window", [1, 2, 4])
@pytest.mark.parametrize("parts", [parts for name, parts in DOCUMENTS.items() if name != "text"])
def test_patches_are_in_the_windows_of_qwen2_5_vl(parts, window):
    layout = ImageLayout(patch=2, merge=2, token=TOKEN, window=window)
    row, tokens, images = build(parts, layout)
    options = dict(spatial_merge_size=2, window_size=window * 4, patch_size=2)
    order, bounds = get_vision_window_index(thw(images), **options)
    count = sum(image.patches for image in images)
    positions = get_vision_position_ids(thw(images), 2).reshape(-1, 4, 2)[order].reshape(-1, 2).numpy()
    assert np.array_equal(row["patch_positions"][:count], positions)
    assert np.array_equal(row["image_place"][: len(tokens)][tokens == TOKEN], torch.argsort(order).numpy())
    bounds = bounds.numpy()
    sizes = np.diff(bounds)
    assert np.array_equal(row["window_start"][:count], np.repeat(bounds[:-1], sizes))
    assert np.array_equal(row["window_end"][:count], np.repeat(bounds[1:], sizes))
    grids = torch.cat([torch.tensor([image.grid] * image.patches) for image in images])
    assert np.array_equal(row["patch_grid"][:count], grids.numpy())


@pytest.mark.parametrize("parts", DOCUMENTS.values(), ids=DOCUMENTS)
def test_image_tokens_see_the_keys_that_gemma3_shows_them(parts):
    row, tokens, _ = build(parts, ImageLayout(2, 2, TOKEN, bidirectional=True))
    kinds = ["full_attention", "sliding_attention"]
    config = Gemma3TextConfig(
        layer_types=kinds, num_hidden_layers=2, sliding_window=7, attn_implementation="eager"
    )  # an image of ten tokens is longer than the window, and is not seen whole
    blocks = get_block_sequence_ids_for_mask(torch.from_numpy(tokens == TOKEN).int()[None])
    masks = create_masks_for_vision_model(config, torch.zeros(1, len(tokens), 4), None, None, None, blocks)
    keys = np.arange(len(tokens))
    before_end = keys < row["key_end"][: len(tokens), None]
    in_window = keys > keys[:, None] - config.sliding_window
    for kind, seen in zip(kinds, (before_end, before_end & in_window)):
        assert np.array_equal(seen, (masks[kind][0, 0] == 0).numpy())
