"""Ministral 3: Mistral whose queries grow with their position beyond the rope's original ones."""

from typing import Any

from jaxtune.models.families import llama
from jaxtune.models.structure.model_spec import ModelSpec

CLASSIFIER = "Ministral3"

NAMES, IGNORABLE = llama.NAMES_WITHOUT_BIAS, llama.IGNORABLE
ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16_384,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}
DEFAULTS = {
    "vocab_size": 131_072,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 34,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 262_144,
    "rms_norm_eps": 1e-5,
}


def read_spec(config: dict[str, Any]) -> ModelSpec:
    """ModelSpec of a `Ministral3ForCausalLM` config.json."""
    config = DEFAULTS | {"rope_parameters": ROPE} | config
    rope = llama.read_rope(config, query_growth=(config["rope_parameters"] or {}).get("llama_4_scaling_beta", 0.0))
    return llama.common_spec("ministral3", config, config.get("sliding_window"), rope)
