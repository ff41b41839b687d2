"""Qwen3: Llama with norms on queries and keys, and a window on some layers."""

from typing import Any

from jaxtune.models.families import llama
from jaxtune.models.spec import ModelSpec

NAMES = {
    **llama.NAMES,
    "attention.q_norm.weight": "model.layers.{layer}.self_attn.q_norm.weight",
    "attention.k_norm.weight": "model.layers.{layer}.self_attn.k_norm.weight",
}
IGNORABLE = llama.IGNORABLE


def read_spec(config: dict[str, Any]) -> ModelSpec:
    """ModelSpec of a `Qwen3ForCausalLM` config.json."""
    bias = config.get("attention_bias", False)
    return llama.common_spec(
        "qwen3",
        {"head_dim": 128} | config,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        layers=llama.windowed_layers(config),
    )
