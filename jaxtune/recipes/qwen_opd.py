"""On-policy distillation: a small Qwen3 chat model answers prompts, and a larger one scores its answers; one GPU.

    python -m jaxtune.train --config=qwen_opd
    python -m jaxtune.train --config=qwen_opd:PATH_OR_HUB_ID --config.distill.teacher=PATH_OR_HUB_ID

The data is prompts, as in qwen_grpo; answers in it are not read. The GPUs hold the teacher and the student in training
together. Watch these metrics: divergence, which should fall; completions/clipped_ratio, the share of answers that did
not end within rollout.max_new_tokens; and entropy, which should not fall to 0. To train adapters of the student, add
--config.lora.enabled=True and a higher optim.learning_rate.
"""

from jaxtune.config import dataset
from jaxtune.recipes import qwen_full


def get_config(model="Qwen/Qwen3-0.6B"):
    """Return the config for a student: a Hugging Face folder or hub id."""
    config = qwen_full.get_config(model)
    config.data.datasets = (dataset(path="openai/gsm8k", subset="main"),)
    config.data.validation_split = 0.0
    config.data.seq_len = 1024
    config.chat.template = "qwen3_nothinking"
    config.distill.teacher = "Qwen/Qwen3-4B"
    config.distill.own_answers = 1.0  # in every step
    config.distill.divergence = "reverse_kl"  # KL(student || teacher)
    config.distill.top_k = 64  # the rest of the vocabulary is one more outcome
    config.rollout.max_new_tokens = 512  # leaves 512 for the prompt
    config.train.micro_batch_size = 4
    config.train.grad_accum_steps = 4
    config.optim.learning_rate = 5e-6
    config.optim.schedule = "constant"
    config.optim.warmup_ratio = 0.0
    config.eval.steps = 0
    return config
