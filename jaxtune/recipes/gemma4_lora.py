"""LoRA of the text decoder of Gemma 4 26B-A4B, with 128 experts and an MLP in each layer, on instructions; one GPU.

Hardware: a GPU of 80 GB (H100).

2 rows of 2048 tokens: 66.2 GB with --config.memory.remat=block on an H100, according to the compiler, and 10.1 thousand
tokens a second, predicted; the weights take 50.5 GB. The adapter fits the whole model, which also sees images.
Attention and the dense MLPs have adapters; with --config.lora.target_modules=all-linear each expert has its own.

    python -m jaxtune.train --config=gemma4_lora
    python -m jaxtune.train --config=gemma4_lora:PATH_OR_HUB_ID '--config.data.datasets[0].path=my.jsonl'
"""

from jaxtune.recipes import qwen_lora


def get_config(model="google/gemma-4-26B-A4B-it"):
    """Return the config of qwen_lora for a Gemma 4 model, with adapters on attention and dense MLPs."""
    config = qwen_lora.get_config(model)
    config.lora.target_modules = r"(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)$"
    return config
