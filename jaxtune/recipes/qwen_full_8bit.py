"""Full fine-tuning of a Qwen3 model with 8-bit AdamW; one GPU, or several (parameters are sharded over all of them).

Hardware: GPUs of 80 GB or more (H100).

6 bytes a weight: gradients and weights in bfloat16, the weights with stochastic rounding, and both moments in 8 bits.
Qwen3-8B, 8 rows of 2048 tokens: 57.8 GB on an H100 with --config.memory.remat=block, according to the compiler.

    python -m jaxtune.train --config=qwen_full_8bit
    python -m jaxtune.train --config=qwen_full_8bit:PATH_OR_HUB_ID '--config.data.datasets[0].path=my.jsonl'
"""

from jaxtune.recipes import qwen_full


def get_config(model="Qwen/Qwen3-8B"):
    """Return the config of qwen_full with 6 bytes a weight instead of 16."""
    config = qwen_full.get_config(model)
    config.optim.name = "adamw_8bit"
    config.precision.master_dtype = "bfloat16"
    config.precision.gradient_dtype = "bfloat16"
    # One micro-batch: accumulation would need a second copy of the gradients.
    config.train.micro_batch_size = 8
    config.train.grad_accum_steps = 1
    return config
