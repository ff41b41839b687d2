"""QLoRA of a Qwen3 model on instructions, with linear layers frozen in FP8; one GPU.

Hardware: a GPU of 24 GB or more (RTX 4090).

e4m3 with a scale for each block of 128 x 128, 1 byte a weight. Qwen3-8B, 2 rows of 2048 tokens: 12.9 GB on an H100
with --config.memory.remat=block, according to the compiler. A checkpoint with weight_scale_inv (Qwen3-8B-FP8) loads
as it is: give its path and --config.quant.format=None.

    python -m jaxtune.train --config=qwen_qlora_fp8
    python -m jaxtune.train --config=qwen_qlora_fp8:PATH_OR_HUB_ID '--config.data.datasets[0].path=my.jsonl'
"""

from jaxtune.recipes import qwen_lora


def get_config(model="Qwen/Qwen3-8B"):
    """Return the config of qwen_lora with a quantized base."""
    config = qwen_lora.get_config(model)
    config.quant.format = "fp8"
    return config
