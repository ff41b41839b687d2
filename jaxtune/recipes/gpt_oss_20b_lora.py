"""LoRA of gpt-oss-20b, with 32 experts frozen in MXFP4 as published, on instructions; one GPU.

Hardware: a GPU of 24 GB or more (RTX 4090).

A row of 2048 tokens: 15.7 GB on an H100, according to the compiler. 13.7 GB are the weights as published:
10.2 GB of experts, and the rest in bfloat16. Only attention has adapters.

    python -m jaxtune.train --config=gpt_oss_20b_lora
    python -m jaxtune.train --config=gpt_oss_20b_lora '--config.data.datasets[0].path=my.jsonl'
"""

from jaxtune.recipes import qwen3_30b_a3b_qlora


def get_config(model="openai/gpt-oss-20b"):
    """Return the config of qwen3_30b_a3b_qlora with experts in MXFP4 and attention as stored."""
    config = qwen3_30b_a3b_qlora.get_config(model)
    config.quant.format = "mxfp4"
    config.quant.exclude = "self_attn"
    return config
