"""QLoRA of the text decoder of Gemma 4 31B, with linear layers frozen in NF4, on instructions; one GPU.

Hardware: a GPU of 80 GB (H100).

2 rows of 2048 tokens: 65.9 GB with --config.memory.remat=none on an H100, according to the compiler, and 3.4 thousand
tokens a second, predicted. XLA computes the attention of global layers, whose heads have 512 features;
--config.attention.backend=triton takes kernels.

    python -m jaxtune.train --config=gemma4_31b_qlora
    python -m jaxtune.train --config=gemma4_31b_qlora:PATH_OR_HUB_ID '--config.data.datasets[0].path=my.jsonl'
"""

from jaxtune.recipes import qwen_qlora_nf4


def get_config(model="google/gemma-4-31B-it"):
    """Return the config of qwen_qlora_nf4 for a Gemma 4 model."""
    return qwen_qlora_nf4.get_config(model)
