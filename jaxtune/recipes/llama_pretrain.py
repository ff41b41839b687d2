"""Pretraining of a Llama model from random weights; one GPU, or several (parameters are sharded over all of them).

Hardware: GPUs of 24 GB or more (RTX 4090).

The argument is a Hugging Face folder or hub id; only its config.json and tokenizer are used.

    python -m jaxtune.train --config=llama_pretrain
    python -m jaxtune.train --config=llama_pretrain:PATH_OR_HUB_ID '--config.data.datasets[0].path=FOLDER'
"""

from jaxtune.config import dataset, new_config


def get_config(model="HuggingFaceTB/SmolLM2-135M"):
    """Return the config for the shape and tokenizer of a model."""
    config = new_config()
    config.model.path = model
    config.model.from_scratch = True
    config.data.datasets = (dataset(path="Salesforce/wikitext", subset="wikitext-103-raw-v1", type="text"),)
    config.data.validation_split = 0.005
    config.data.seq_len = 2048

    config.train.max_steps = 2000
    config.train.micro_batch_size = 8
    config.train.grad_accum_steps = 8  # 8 * 8 * 2048 = 131,072 tokens a step on one GPU

    config.optim.learning_rate = 1e-3
    config.optim.schedule = "wsd"  # warm-up, stable, decay over the last cooldown_steps
    config.optim.warmup_steps = 100
    config.optim.cooldown_steps = 400
    config.optim.weight_decay = 0.1  # 0.1 and 0.95 as in GPT-3 and Llama
    config.optim.beta2 = 0.95

    config.ckpt.save_steps = 200
    config.eval.steps = 200
    return config
