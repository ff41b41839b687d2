"""KTO of a Qwen3 chat model with LoRA, on single answers marked as desirable or not; one GPU.

    python -m jaxtune.train --config=qwen_kto
    python -m jaxtune.train --config=qwen_kto:PATH_OR_HUB_ID '--config.data.datasets[0].path=my.jsonl'

Rows of my.jsonl have the columns prompt, completion (text or messages) and label (true or false). If one label
is much rarer, compensate with preference.desirable_weight and undesirable_weight.
"""

from jaxtune.config import dataset
from jaxtune.recipes import qwen_dpo


def get_config(model="Qwen/Qwen3-0.6B"):
    """Return the config for a model: a Hugging Face folder or hub id."""
    config = qwen_dpo.get_config(model)
    config.data.datasets = (dataset(path="trl-lib/kto-mix-14k"),)
    config.preference.loss = "kto"
    config.train.micro_batch_size = 4  # the KL estimate is a mean over a micro-batch
    config.train.grad_accum_steps = 2
    return config
