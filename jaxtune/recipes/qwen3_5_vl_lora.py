"""LoRA of Qwen3.5 or Qwen3-VL on conversations with images; one GPU.

Hardware: a GPU of 48 GB or more.

Qwen3.5-9B, 2 rows of 2048 tokens and 8192 patches: 36.8 GB with --config.memory.remat=none, and Qwen3-VL-8B 33.3 GB, on
an H100, according to the compiler.

The decoder gets adapters; the vision tower and the projector are frozen, and run in each step. A patch has 16 x 16
pixels, and four patches become a token, so images may fill up to all of a row's tokens.

    python -m jaxtune.train --config=qwen3_5_vl_lora '--config.data.datasets[0].path=my.jsonl'
    python -m jaxtune.train --config=qwen3_5_vl_lora:Qwen/Qwen3-VL-8B-Instruct '--config.data.datasets[0].path=my.jsonl'

Rows of my.jsonl have the column messages, with the images' paths (docs/guides/images.md).
"""

from jaxtune.config import dataset
from jaxtune.recipes import qwen_lora


def get_config(model="Qwen/Qwen3.5-9B"):
    """Return the config of qwen_lora for a model that sees, with images."""
    config = qwen_lora.get_config(model)
    config.data.datasets = (dataset(path="images.jsonl", type="conversation"),)
    config.vision.patches_per_row = 8192  # as many as 2048 image tokens have
    return config
