"""Granite 3: Llama whose embeddings, residual additions, attention logits and logits are scaled."""

from collections.abc import Mapping
from typing import Any

from jaxtune.models.families import llama
from jaxtune.models.structure.model_spec import ModelSpec

NAMES, IGNORABLE = llama.NAMES, llama.IGNORABLE


def read_spec(config: dict[str, Any]) -> ModelSpec:
    """ModelSpec of a `GraniteForCausalLM` config.json."""
    return common_spec("granite", config, mlp_bias=config.get("mlp_bias", False))


def common_spec(family: str, config: dict[str, Any], model: Mapping[str, Any] = {}, **fields: Any) -> ModelSpec:
    """Return a ModelSpec with the fields that Granite families share; `model` and `fields` as in llama.common_spec."""
    return llama.common_spec(
        family,
        {"rms_norm_eps": 1e-6} | config,
        layer={"residual_scale": config.get("residual_multiplier", 1.0)},
        model={
            "embedding_scale": config.get("embedding_multiplier", 1.0),
            "logit_scale": 1 / config.get("logits_scaling", 1.0),  # transformers divides the logits
            **model,
        },
        scale=config.get("attention_multiplier", 1.0),
        **fields,
    )
