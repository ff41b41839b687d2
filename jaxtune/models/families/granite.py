"""Granite 3: Llama whose embeddings, residual additions, attention logits and logits are scaled."""

from typing import Any

from jaxtune.models.families import llama
from jaxtune.models.spec import ModelSpec

NAMES, IGNORABLE = llama.NAMES, llama.IGNORABLE


def read_spec(config: dict[str, Any]) -> ModelSpec:
    """ModelSpec of a `GraniteForCausalLM` config.json."""
    return llama.common_spec(
        "granite",
        {"rms_norm_eps": 1e-6} | config,
        mlp_bias=config.get("mlp_bias", False),
        layer={"residual_scale": config.get("residual_multiplier", 1.0)},
        model={
            "embedding_scale": config.get("embedding_multiplier", 1.0),
            "logit_scale": 1 / config.get("logits_scaling", 1.0),
        },
        bias=frozenset("qkvo" if config.get("attention_bias", False) else ""),
        scale=config.get("attention_multiplier", 1.0),
    )
