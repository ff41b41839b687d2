"""A decision model from a Qwen3 chat model with LoRA: calibrated answers from one forward pass; one GPU.

Hardware: a GPU of 24 GB or more (RTX 4090); 2 rows of 2048 tokens: 5.2 GB on an H100, according to the compiler.

    python -m jaxtune.train --config=qwen_decision '--config.data.datasets[0].path=my.jsonl'
    python -m jaxtune.generate --model=runs/qwen_decision --decide --input=questions.jsonl

Rows of my.jsonl have the columns state (text), questions ({name: {type, instructions, criteria}}, with type noul, which
is yes or no, choice or score) and labels ({name: label}); docs/guides/decision_models.md has examples. eval_ece is the
distance between probabilities and frequencies; the fitted temperatures (eval_temperature_...) go into the export.
"""

from jaxtune.config import dataset
from jaxtune.recipes import qwen_lora


def get_config(model="Qwen/Qwen3-0.6B"):
    """Return the config for a model: a Hugging Face folder or hub id."""
    config = qwen_lora.get_config(model)
    config.data.datasets = (dataset(path="decisions.jsonl"),)
    config.data.validation_split = 0.1
    config.decision.loss = "cross_entropy"
    config.optim.learning_rate = 1e-4
    return config
