"""DPO of a Qwen3 chat model with LoRA, on pairs of answers; one GPU.

    python -m jaxtune.train --config=qwen_dpo
    python -m jaxtune.train --config=qwen_dpo:PATH_OR_HUB_ID '--config.data.datasets[0].path=my.jsonl'

Rows of my.jsonl have the columns prompt, chosen and rejected, text or messages, or whole conversations in the last two.
The reference is the base model: one extra forward pass, no extra memory. At the first step the loss is ln 2 and
rewards/margins is 0; both answers become less likely if the learning rate is too high.
"""

from jaxtune.config import dataset
from jaxtune.recipes import qwen_lora


def get_config(model="Qwen/Qwen3-0.6B"):
    """Return the config for a model: a Hugging Face folder or hub id."""
    config = qwen_lora.get_config(model)
    config.data.datasets = (dataset(path="trl-lib/ultrafeedback_binarized"),)
    config.data.seq_len = 4096
    config.preference.loss = "sigmoid"
    config.preference.beta = 0.1  # as in the paper, arXiv:2305.18290
    config.optim.learning_rate = 1e-5
    config.optim.warmup_ratio = 0.1
    return config
