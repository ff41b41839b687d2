"""Pretraining of a Qwen3 model from random weights with NorMuon; one GPU, or several (parameters are sharded over all).

Hardware: GPUs of 24 GB or more (RTX 4090).

The argument is a Hugging Face folder or hub id; only its config.json and tokenizer are used.

    python -m jaxtune.train --config=qwen_pretrain_normuon
    python -m jaxtune.train --config=qwen_pretrain_normuon:PATH '--config.data.datasets[0].path=FOLDER'
"""

from jaxtune.recipes import llama_pretrain


def get_config(model="Qwen/Qwen3-0.6B"):
    """Return the config of llama_pretrain with NorMuon for the matrices, and a z-loss."""
    config = llama_pretrain.get_config(model)
    config.optim.name = "normuon"
    config.train.z_loss = 1e-4  # as in PaLM, arXiv:2204.02311
    return config
