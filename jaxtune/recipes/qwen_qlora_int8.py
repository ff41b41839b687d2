"""QLoRA of a Qwen3 model on instructions, with linear layers frozen in INT8; one GPU.

Hardware: a GPU of 24 GB or more (RTX 4090).

One scale per row, 1 byte a weight: the smallest error of the four formats. Qwen3-8B, 2 rows of 2048 tokens: 12.9 GB on
an H100 with --config.memory.remat=block, according to the compiler.

    python -m jaxtune.train --config=qwen_qlora_int8
    python -m jaxtune.train --config=qwen_qlora_int8:PATH_OR_HUB_ID '--config.data.datasets[0].path=my.jsonl'
"""

from jaxtune.recipes import qwen_lora


def get_config(model="Qwen/Qwen3-8B"):
    """Return the config of qwen_lora with a quantized base."""
    config = qwen_lora.get_config(model)
    config.quant.format = "int8"
    return config
