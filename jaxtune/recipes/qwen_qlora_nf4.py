"""QLoRA of a Qwen3 model on instructions, with linear layers frozen in NF4; one GPU.

Hardware: a GPU of 24 GB or more (RTX 4090).

The format of bitsandbytes, with identical codes: blocks of 64 with scales in 8 bits, 0.52 bytes a weight. Qwen3-8B, 2
rows of 2048 tokens: 20.9 GB on an H100, according to the compiler; 9.6 GB with --config.memory.remat=block. A
checkpoint that bitsandbytes quantized loads as it is: give its path and --config.quant.format=None.

    python -m jaxtune.train --config=qwen_qlora_nf4
    python -m jaxtune.train --config=qwen_qlora_nf4:PATH_OR_HUB_ID '--config.data.datasets[0].path=my.jsonl'
"""

from jaxtune.recipes import qwen_lora


def get_config(model="Qwen/Qwen3-8B"):
    """Return the config of qwen_lora with a quantized base."""
    config = qwen_lora.get_config(model)
    config.quant.format = "nf4"
    return config
