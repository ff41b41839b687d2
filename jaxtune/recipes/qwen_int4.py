"""Quantization-aware training: a Qwen3 in int4 learns from itself in bfloat16 what quantizing has lost; one GPU.

Hardware: a GPU of 24 GB or more (RTX 4090); 2 rows of 2048 tokens: 6.9 GB on an H100, according to the compiler.

    python -m jaxtune.train --config=qwen_int4 --config.data.datasets=TEXTS_OR_CHATS
    python -m jaxtune.train --config=qwen_int4:PATH_OR_HUB_ID

Adapters are trained. They are merged into each layer before it is quantized, also in the export <run>/merged. The data
need not be what the model was trained on. The model in bfloat16 scores it once, before the first step; the scores are
kept in data.cache_dir, 516 bytes a token.
"""

from jaxtune.recipes import qwen_lora


def get_config(model="Qwen/Qwen3-0.6B"):
    """Return the config for a model: a Hugging Face folder or hub id."""
    config = qwen_lora.get_config(model)
    config.serve.format = "int4"
    config.lora.dropout = 0.0
    config.serve.distill = True  # the model itself, in bfloat16
    config.export.merge = True
    config.train.max_steps = 300
    return config
