"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values, and a window on some layers."""

from typing import Any

from jaxtune.models.families import llama
from jaxtune.models.structure.model_spec import ModelSpec

CLASSIFIER = "Qwen2"

# "attention.q.bias"[-6] is "q".
NAMES = {**llama.NAMES_WITHOUT_BIAS, **{name: hf for name, hf in llama.BIAS_NAMES.items() if name[-6] in "qkv"}}
IGNORABLE = llama.IGNORABLE


def read_spec(config: dict[str, Any]) -> ModelSpec:
    """ModelSpec of a `Qwen2ForCausalLM` config.json."""
    return llama.common_spec("qwen2", config, llama.optional_windows(config), bias=frozenset("qkv"))
