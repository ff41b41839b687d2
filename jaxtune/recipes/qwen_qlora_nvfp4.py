"""QLoRA of a Qwen3 model on instructions, with linear layers frozen in NVFP4; one GPU.

Hardware: a GPU of 24 GB or more (RTX 4090).

e2m1 with an e4m3 scale for each 16 weights, 0.56 bytes a weight. Only the storage is in NVFP4, so any GPU works. A
compressed-tensors checkpoint loads as it is: give its path and --config.quant.format=None.
Qwen3-8B, 2 rows of 2048 tokens: 9.9 GB on an H100 with --config.memory.remat=block, according to the compiler.

    python -m jaxtune.train --config=qwen_qlora_nvfp4
    python -m jaxtune.train --config=qwen_qlora_nvfp4:PATH_OR_HUB_ID '--config.data.datasets[0].path=my.jsonl'
"""

from jaxtune.recipes import qwen_lora


def get_config(model="Qwen/Qwen3-8B"):
    """Return the config of qwen_lora with a quantized base."""
    config = qwen_lora.get_config(model)
    config.quant.format = "nvfp4"
    return config
