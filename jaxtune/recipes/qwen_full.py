"""Full fine-tuning of a Qwen3 model on instructions; one GPU, or several (parameters are sharded over all of them).

Hardware: GPUs of 24 GB or more (RTX 4090); Qwen3-0.6B, 2 rows of 2048 tokens: 15.5 GB, according to the compiler.

python -m jaxtune.train --config=qwen_full
python -m jaxtune.train --config=qwen_full:PATH_OR_HUB_ID '--config.data.datasets[0].path=my.jsonl'
"""

from jaxtune.config import new_config
from jaxtune.recipes import qwen_lora


def get_config(model="Qwen/Qwen3-0.6B"):
    """Return the config of qwen_lora with every parameter trained, at a lower learning rate."""
    config = qwen_lora.get_config(model)
    config.lora = new_config().lora  # back to the defaults: no adapters
    config.optim.learning_rate = 1e-5
    config.optim.weight_decay = 0.01
    return config
