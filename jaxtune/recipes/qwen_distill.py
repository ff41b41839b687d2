"""Distillation of a small Qwen3 from a larger one, whose likeliest tokens it learns; one GPU, or several.

    python -m jaxtune.train --config=qwen_distill
    python -m jaxtune.train --config=qwen_distill:PATH_OR_HUB_ID --config.distill.teacher=PATH_OR_HUB_ID

Data as of qwen_lora. The teacher scores it once, before the first step, on the run's own mesh, and is then released:
the GPUs must hold its weights (in bfloat16), but not beside the student that is trained. What it said is kept in
data.cache_dir, 516 bytes a token. For adapters of the student add --config.lora.enabled=True and a higher
optim.learning_rate.
"""

from jaxtune.recipes import qwen_full


def get_config(model="Qwen/Qwen3-0.6B"):
    """The recipe for a student: a Hugging Face folder or hub id."""
    config = qwen_full.get_config(model)
    config.distill.teacher = "Qwen/Qwen3-4B"
    config.distill.divergence = "forward_kl"
    config.distill.top_k = 64
    return config
