"""ORPO of a Qwen3 chat model with LoRA, on pairs of answers without a reference; one GPU.

    python -m jaxtune.train --config=qwen_orpo
    python -m jaxtune.train --config=qwen_orpo:PATH_OR_HUB_ID '--config.data.datasets[0].path=my.jsonl'

Rows of my.jsonl are as in qwen_dpo. A step has one forward pass, while DPO has two.
"""

from jaxtune.recipes import qwen_dpo


def get_config(model="Qwen/Qwen3-0.6B"):
    """Return the config for a model: a Hugging Face folder or hub id."""
    config = qwen_dpo.get_config(model)
    config.preference.loss = "orpo"
    config.optim.learning_rate = 8e-6  # from the authors, arXiv:2403.07691
    return config
