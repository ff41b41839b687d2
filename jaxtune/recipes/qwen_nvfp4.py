"""LoRA of a Qwen3 model on instructions, with NVFP4 products in linear layers; one GPU.

Hardware: B200.

e2m1 with an e4m3 scale for each block of 16, and stochastic rounding of gradients, as in NVIDIA's training method
(arXiv:2509.25149). A B200 has NVFP4 units; other GPUs emulate it in bfloat16, which shows its effect on the loss but
saves no time.

    python -m jaxtune.train --config=qwen_nvfp4
    python -m jaxtune.train --config=qwen_nvfp4:PATH_OR_HUB_ID '--config.data.datasets[0].path=my.jsonl'
"""

from jaxtune.recipes import qwen_lora


def get_config(model="Qwen/Qwen3-8B"):
    """Return the config of qwen_lora with NVFP4 products."""
    config = qwen_lora.get_config(model)
    config.precision.recipe = "nvfp4"
    return config
