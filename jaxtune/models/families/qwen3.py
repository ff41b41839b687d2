"""Qwen3: Llama with norms on queries and keys, and a window on some layers."""

from typing import Any

from jaxtune.models.families import llama
from jaxtune.models.structure.model_spec import ModelSpec

CLASSIFIER = "Qwen3"

QK_NORMS = {f"attention.{x}_norm.weight": f"model.layers.{{layer}}.self_attn.{x}_norm.weight" for x in "qk"}
NAMES, IGNORABLE = llama.NAMES | QK_NORMS, llama.IGNORABLE


def read_spec(config: dict[str, Any]) -> ModelSpec:
    """ModelSpec of a `Qwen3ForCausalLM` config.json."""
    return common_spec("qwen3", config)


def common_spec(family: str, config: dict[str, Any], **fields: Any) -> ModelSpec:
    """Return a ModelSpec with the fields that families of Qwen3 share; `fields` as in llama.common_spec."""
    config = {"head_dim": 128} | config
    return llama.common_spec(family, config, llama.optional_windows(config), qk_norm="head", **fields)
