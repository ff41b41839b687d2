"""Mistral: Llama with a sliding window on every layer."""

from typing import Any

from jaxtune.models.families import llama
from jaxtune.models.spec import ModelSpec

NAMES, IGNORABLE = llama.NAMES_WITHOUT_BIAS, llama.IGNORABLE


def read_spec(config: dict[str, Any]) -> ModelSpec:
    """ModelSpec of a `MistralForCausalLM` config.json."""
    return llama.common_spec("mistral", config, config.get("sliding_window", 4096))
