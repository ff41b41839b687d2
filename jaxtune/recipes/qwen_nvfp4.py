"""LoRA of a Qwen3 model on instructions, its linears multiplied in NVFP4; one GPU.

e2m1 with an e4m3 scale each 16, gradients rounded stochastically, as NVIDIA trains (arXiv:2509.25149). A B200
multiplies such numbers; other cards emulate them in bfloat16, which shows what NVFP4 does to a loss and saves no time.

    python -m jaxtune.train --config=qwen_nvfp4
    python -m jaxtune.train --config=qwen_nvfp4:PATH_OR_HUB_ID '--config.data.datasets[0].path=my.jsonl'
"""

from jaxtune.recipes import qwen_lora


def get_config(model="Qwen/Qwen3-8B"):
    """The LoRA recipe with NVFP4 products."""
    config = qwen_lora.get_config(model)
    config.precision.recipe = "nvfp4"
    return config
