"""GRPO of a Qwen3 chat model with LoRA, rewarded for right answers to questions; one GPU.

    python -m jaxtune.train --config=qwen_grpo
    python -m jaxtune.train --config=qwen_grpo:PATH_OR_HUB_ID --config.rollout.rewards=my_rewards.py:right

Each step takes one prompt per rollout.group_size completions. Your reward function is called like `right` below, with
the columns of the data as keyword arguments. Watch these metrics: reward, which should rise; completions/clipped_ratio,
the share of completions that did not end within rollout.max_new_tokens; and frac_reward_zero_std, the share of prompts
whose completions all have the same reward and so give no gradient. Answers are generated without thinking; with it
(chat.template=qwen3) a completion needs several times as many tokens.
"""

import re

from jaxtune.config import dataset
from jaxtune.recipes import qwen_lora

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def get_config(model="Qwen/Qwen3-0.6B"):
    """Return the config for a model: a Hugging Face folder or hub id."""
    config = qwen_lora.get_config(model)
    config.data.datasets = (dataset(path="openai/gsm8k", subset="main"),)
    config.data.validation_split = 0.0
    config.data.seq_len = 1024  # prompt and completion together
    config.chat.template = "qwen3_nothinking"
    config.rollout.rewards = ("jaxtune.recipes.qwen_grpo:right",)
    config.rollout.group_size = 8
    config.rollout.max_new_tokens = 512  # leaves 512 for the prompt
    config.train.micro_batch_size = 8
    config.train.grad_accum_steps = 8  # 64 completions a step on one GPU: 8 of each of 8 prompts
    config.optim.learning_rate = 1e-5
    config.optim.schedule = "constant"
    config.optim.warmup_ratio = 0.0
    config.eval.steps = 0
    return config


def right(completions, answer, **columns):
    """Return 1 if the last number of a completion equals the answer in the data, which follows ####, else 0."""
    texts = [one if isinstance(one, str) else one[0]["content"] for one in completions]
    return [float(_last_number(text) == _last_number(wanted)) for text, wanted in zip(texts, answer)]


def _last_number(text):
    numbers = NUMBER.findall(text)
    return float(numbers[-1].replace(",", "")) if numbers else None
