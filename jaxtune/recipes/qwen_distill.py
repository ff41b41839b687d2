"""Distillation of a small Qwen3 from the most likely tokens of a larger one; one GPU, or several.

    python -m jaxtune.train --config=qwen_distill
    python -m jaxtune.train --config=qwen_distill:PATH_OR_HUB_ID --config.distill.teacher=PATH_OR_HUB_ID

Data as in qwen_lora. The teacher scores it once, before the first step, on the run's mesh, and is then released: the
GPUs must hold its weights (in bfloat16), but not together with the student in training. The scores are kept in
data.cache_dir, 516 bytes a token. To train adapters of the student, add --config.lora.enabled=True and a higher
optim.learning_rate.
"""

from jaxtune.recipes import qwen_full


def get_config(model="Qwen/Qwen3-0.6B"):
    """Return the config for a student: a Hugging Face folder or hub id."""
    config = qwen_full.get_config(model)
    config.distill.teacher = "Qwen/Qwen3-4B"
    config.distill.divergence = "forward_kl"  # KL(teacher || student)
    config.distill.top_k = 64  # 8 * 64 + 4 bytes a token in the cache
    return config
