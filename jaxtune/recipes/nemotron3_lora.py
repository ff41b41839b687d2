"""LoRA of Nemotron-3 Nano 30B-A3B, with Mamba-2 and 128 experts, on instructions; one GPU.

Hardware: a GPU of 80 GB (H100).

A row of 2048 tokens: 72.4 GB on an H100, according to the compiler, and 6.7 thousand tokens a second, predicted.
Adapters are on attention, which 6 of the 52 layers have, on in_proj of Mamba-2 and on shared experts; peft cannot load
adapters of other experts or out_proj.

    python -m jaxtune.train --config=nemotron3_lora
    python -m jaxtune.train --config=nemotron3_lora:PATH_OR_HUB_ID '--config.data.datasets[0].path=my.jsonl'
"""

from jaxtune.recipes import qwen_lora


def get_config(model="nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"):
    """Return the config of qwen_lora for Nemotron-3 Nano, with one row at a time."""
    config = qwen_lora.get_config(model)
    config.memory.remat = "block"
    config.train.micro_batch_size = 1
    config.train.grad_accum_steps *= 2  # the same rows in a step
    return config
