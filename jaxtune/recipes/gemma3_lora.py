"""LoRA fine-tuning of the text decoder of Gemma 3, a vision model, on instructions; one GPU.

Hardware: a GPU of 24 GB or more (RTX 4090).

Gemma 3 4B, 2 rows of 2048 tokens: 19.1 GB with --config.memory.remat=none, 12.0 GB with block, on an H100, according to
the compiler. The adapter fits the whole model; its other tensors are not read, and `export --merge` copies them.

    python -m jaxtune.train --config=gemma3_lora
    python -m jaxtune.train --config=gemma3_lora:PATH_OR_HUB_ID '--config.data.datasets[0].path=my.jsonl'
"""

from jaxtune.recipes import qwen_lora


def get_config(model="google/gemma-3-4b-it"):
    """Return the config of qwen_lora for a Gemma 3 model."""
    return qwen_lora.get_config(model)
