"""LoRA of a Qwen3 model on instructions, with FP8 products in linear layers; one GPU with FP8 units.

Hardware: a GPU of 24 GB or more (RTX 4090).

e4m3 weights and activations, e5m2 gradients, delayed scaling. The frozen weights are quantized once, when they are
read, and stored with their transposes, 2 bytes a weight. Qwen3-8B, 2 rows of 2048 tokens: 31.3 GB on an H100, and 19.7
GB with --config.memory.remat=block, according to the compiler. With --config.lora.enabled=False all weights are
trained.
Ada, Hopper and Blackwell have FP8 units; a CPU emulates the numbers, slowly.

    python -m jaxtune.train --config=qwen_fp8
    python -m jaxtune.train --config=qwen_fp8:PATH_OR_HUB_ID '--config.data.datasets[0].path=my.jsonl'
"""

from jaxtune.recipes import qwen_lora


def get_config(model="Qwen/Qwen3-8B"):
    """Return the config of qwen_lora with FP8 products."""
    config = qwen_lora.get_config(model)
    config.precision.recipe = "fp8_hybrid"
    return config
