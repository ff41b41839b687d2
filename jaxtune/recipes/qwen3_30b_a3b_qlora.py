"""QLoRA of Qwen3-30B-A3B, with 128 experts and linear layers frozen in NF4, on instructions; one GPU.

Hardware: a GPU of 24 GB or more (RTX 4090).

A row of 2048 tokens: 18.3 GB on an H100, according to the compiler. Only attention has adapters; with
--config.lora.target_modules=all-linear each expert has its own, and a row takes 35.1 GB.

    python -m jaxtune.train --config=qwen3_30b_a3b_qlora
    python -m jaxtune.train --config=qwen3_30b_a3b_qlora '--config.data.datasets[0].path=my.jsonl'
"""

from jaxtune.recipes import qwen_qlora_nf4


def get_config(model="Qwen/Qwen3-30B-A3B"):
    """Return the config of qwen_qlora_nf4, with one row at a time and adapters on attention."""
    config = qwen_qlora_nf4.get_config(model)
    config.lora.target_modules = "q_proj|k_proj|v_proj|o_proj"
    config.memory.remat = "block"
    config.train.micro_batch_size = 1
    config.train.grad_accum_steps *= 2  # the same rows in a step
    return config
