"""LoRA of gpt-oss-20b, a mixture of 32 experts, on instructions, its experts frozen in MXFP4 as in its files; one GPU.

Hardware: a GPU of 24 GB or more (RTX 4090).

A row of 2048 tokens: 15.7 GB on an H100, according to the compiler. 13.7 GB of it are the weights as they are
published: 10.2 GB of experts, the rest in bfloat16. Adapters are on attention alone.

    python -m jaxtune.train --config=gpt_oss_20b_lora
    python -m jaxtune.train --config=gpt_oss_20b_lora '--config.data.datasets[0].path=my.jsonl'
"""

from jaxtune.recipes import qwen3_30b_a3b_qlora


def get_config(model="openai/gpt-oss-20b"):
    """The recipe of Qwen3-30B-A3B, with experts in MXFP4 and attention as it is stored."""
    config = qwen3_30b_a3b_qlora.get_config(model)
    config.quant.format = "mxfp4"
    config.quant.exclude = "self_attn"
    return config
