"""QLoRA of Qwen3.5, 3.6 or 3.8 27B, with linear layers frozen in NF4, on instructions; one GPU.

Hardware: a GPU of 80 GB (H100).

2 rows of 2048 tokens: 63.6 GB with --config.memory.remat=none on an H100, according to the compiler, and 4.3 thousand
tokens a second, predicted. Qwen3.6 27B and Qwen3.8 27B have the same shape.

    python -m jaxtune.train --config=qwen3_5_27b_qlora
    python -m jaxtune.train --config=qwen3_5_27b_qlora:PATH_OR_HUB_ID '--config.data.datasets[0].path=my.jsonl'
"""

from jaxtune.recipes import qwen_qlora_nf4


def get_config(model="Qwen/Qwen3.5-27B"):
    """Return the config of qwen_qlora_nf4 for a Qwen3.5 model."""
    return qwen_qlora_nf4.get_config(model)
