"""Seed-OSS: Llama with biases on queries, keys and values."""

from typing import Any

from jaxtune.models.families import llama
from jaxtune.models.structure.model_spec import ModelSpec

CLASSIFIER = "SeedOss"

NAMES, IGNORABLE = llama.NAMES, llama.IGNORABLE
DEFAULTS = {"head_dim": 128, "num_key_value_heads": 8, "rms_norm_eps": 1e-6}


def read_spec(config: dict[str, Any]) -> ModelSpec:
    """ModelSpec of a `SeedOssForCausalLM` config.json."""
    into, out = config.get("attention_bias", True), config.get("attention_out_bias", False)
    return llama.common_spec(
        "seed_oss",
        DEFAULTS | config,
        mlp_bias=config.get("mlp_bias", False),
        bias=frozenset("qkv" * bool(into) + "o" * bool(out)),
    )
