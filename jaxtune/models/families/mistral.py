"""Mistral: Llama with a sliding window on every layer."""

from typing import Any

from jaxtune.models.families import llama
from jaxtune.models.structure.model_spec import ModelSpec

CLASSIFIER = "Mistral"

NAMES, IGNORABLE = llama.NAMES_WITHOUT_BIAS, llama.IGNORABLE
DEFAULTS = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "sliding_window": 4096,
}


def read_spec(config: dict[str, Any]) -> ModelSpec:
    """ModelSpec of a `MistralForCausalLM` config.json."""
    config = DEFAULTS | config
    return llama.common_spec("mistral", config, config["sliding_window"])
