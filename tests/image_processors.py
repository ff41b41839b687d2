"""Image processors of families, as their publishers configure them with smaller sizes, and pictures to read."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from jaxtune.data.images.image_reader import ImageReader
from jaxtune.image_layout import ImageLayout

_CLIP = {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}
_HALF = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
PIXELS = {"size": {"shortest_edge": 16 * 16, "longest_edge": 64 * 64}}

# preprocessor_config.json and layout by family; the number of the image token is chosen by the test.
PROCESSORS = {
    "qwen2_5_vl": (
        {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 4, "merge_size": 2, **PIXELS, **_CLIP},
        {"patch": 4, "merge": 2, "window": 3, "rope_axes": True},
    ),
    "qwen3_vl": (
        {"image_processor_type": "Qwen2VLImageProcessorFast", "patch_size": 4, "merge_size": 2, **PIXELS, **_HALF},
        {"patch": 4, "merge": 2, "rope_axes": True},
    ),
    "ernie4_5_vl_moe": (
        {"image_processor_type": "Ernie4_5_VLMoeImageProcessor", "patch_size": 4, "merge_size": 2, **PIXELS, **_CLIP},
        {"patch": 4, "merge": 2, "rope_axes": True},
    ),
    "gemma3": (
        {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 32, "width": 32}, **_HALF},
        {"patch": 4, "merge": 4, "bidirectional": True},
    ),
    "gemma4": (
        {"image_processor_type": "Gemma4ImageProcessor", "patch_size": 2, "max_soft_tokens": 70},
        {"patch": 2, "merge": 3, "bidirectional": True},
    ),
    "mistral3": (
        {"image_processor_type": "PixtralImageProcessor", "patch_size": 4, "size": {"longest_edge": 40}, **_CLIP},
        {"patch": 4, "merge": 2},
    ),
}


def image_reader(family: str, folder: Path, token: int = 0, **pixels: Any) -> ImageReader:
    """Write a family's preprocessor_config.json to a folder, and return its reader; `pixels`: limits."""
    processor, layout = PROCESSORS[family]
    folder.mkdir(exist_ok=True, parents=True)
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return ImageReader(folder, family, ImageLayout(token=token, **layout), **pixels)


def picture(height: int, width: int, seed: int = 0, channels: int = 3) -> np.ndarray:
    """Return a smooth picture with noise, uint8 (height, width, channels)."""
    rng = np.random.default_rng(seed)
    waves = np.sin(np.arange(height)[:, None, None] / 5 + np.arange(width)[:, None] / 7 + np.arange(channels))
    return np.clip(128 + 90 * waves + rng.normal(0, 12, (height, width, channels)), 0, 255).astype(np.uint8)
