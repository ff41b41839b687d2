"""LoRA fine-tuning of a Qwen3 model on instructions; one GPU.

Hardware: a GPU of 24 GB or more (RTX 4090); Qwen3-0.6B, 2 rows of 2048 tokens: 6.0 GB, according to the compiler.

    python -m jaxtune.train --config=qwen_lora
    python -m jaxtune.train --config=qwen_lora:PATH_OR_HUB_ID '--config.data.datasets[0].path=my.jsonl'

Rows of my.jsonl have the columns instruction, input (may be empty) and output, or a column messages, a conversation.
"""

from jaxtune.config import dataset, new_config


def get_config(model="Qwen/Qwen3-0.6B"):
    """Return the config for a model: a Hugging Face folder or hub id."""
    config = new_config()
    config.model.path = model
    config.data.datasets = (dataset(path="tatsu-lab/alpaca", type="instruction"),)
    config.data.validation_split = 0.01  # of the documents
    config.data.seq_len = 2048  # tokens of a row, into which documents are packed

    config.lora.enabled = True
    config.lora.rank = 16
    config.lora.alpha = 32.0  # B A is multiplied by alpha / rank = 2
    config.lora.target_modules = "all-linear"  # not only attention, as in the QLoRA paper (arXiv:2305.14314)

    config.train.epochs = 1
    config.train.micro_batch_size = 2
    config.train.grad_accum_steps = 4  # a step has 8 rows on one GPU

    config.optim.learning_rate = 2e-4  # QLoRA's up to 13 billion parameters
    config.optim.schedule = "cosine"
    config.optim.warmup_ratio = 0.03

    config.eval.steps = 100
    return config
