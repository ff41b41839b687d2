"""LoRA of Qwen3.5, with gated delta nets and attention in every fourth layer, on instructions; one GPU.

Hardware: a GPU of 24 GB or more (RTX 4090).

Qwen3.5-9B, 2 rows of 2048 tokens: 22.3 GB with --config.memory.remat=block, 35.7 GB with none, on an H100, according to
the compiler. Only the text decoder is trained; the adapter fits the whole model, which also sees images.

    python -m jaxtune.train --config=qwen3_5_lora
    python -m jaxtune.train --config=qwen3_5_lora:PATH_OR_HUB_ID '--config.data.datasets[0].path=my.jsonl'
"""

from jaxtune.recipes import qwen_lora


def get_config(model="Qwen/Qwen3.5-9B"):
    """Return the config of qwen_lora for a Qwen3.5 model."""
    return qwen_lora.get_config(model)
