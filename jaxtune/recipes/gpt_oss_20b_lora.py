"""LoRA of gpt-oss-20b, a mixture of 32 experts, on instructions, its experts frozen in MXFP4 as in its files; one GPU.

Hardware: a GPU of 24 GB or more (RTX 4090).

A row of 2048 tokens: 15.7 GB on an H100, according to the compiler. 13.7 GB of it are the weights as they are
published: 10.2 GB of experts, the rest in bfloat16. Adapters are on attention alone.

    python -m jaxtune.train --config=gpt_oss_20b_lora
    python -m jaxtune.train --config=gpt_oss_20b_lora '--config.data.datasets[0].path=my.jsonl'
"""

from jaxtune.recipes import qwen_lora


def get_config(model="openai/gpt-oss-20b"):
    """The LoRA recipe, a row at a time, with adapters on attention, which is not quantized."""
    config = qwen_lora.get_config(model)
    config.quant.format = "mxfp4"
    config.quant.exclude = "self_attn"
    config.lora.target_modules = "q_proj|k_proj|v_proj|o_proj"
    config.memory.remat = "block"
    config.train.micro_batch_size = 1
    config.train.grad_accum_steps *= 2
    return config
