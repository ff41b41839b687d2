"""Qwen3.5's text model: Qwen3-Next with a separate projection for each input of a delta net, and dense layers."""

from typing import Any

from jaxtune.models.families import llama, mtp_tensors, qwen3, qwen3_next
from jaxtune.models.structure.model_spec import ModelSpec

CLASSIFIER = "Qwen3_5Text"

NET = qwen3_next.NET
PROJECTIONS = {f"delta_net.{name}.weight": f"{NET}.in_proj_qkv.weight" for name in "qkv"} | {
    f"delta_net.{name}.weight": f"{NET}.in_proj_{name}.weight" for name in "zba"
}
NAMES = llama.NAMES | qwen3.QK_NORMS | qwen3_next.DELTA_NET | PROJECTIONS
IGNORABLE, MORE_TOKENS = qwen3_next.IGNORABLE, qwen3_next.MORE_TOKENS
MTP = mtp_tensors.apart(NAMES, "mtp_num_hidden_layers")
DEFAULTS = qwen3_next.MIXERS | {"num_key_value_heads": 4}


def read_spec(config: dict[str, Any]) -> ModelSpec:
    """ModelSpec of a `Qwen3_5ForCausalLM` config.json."""
    return qwen3_next.common_spec("qwen3_5_text", DEFAULTS | config, fused=False, axes=axes(config))


def axes(config: dict[str, Any]) -> list[int]:
    """Return the pairs of features that turn with the position in time, in height and in width."""
    return llama.rope_entries(config).get("mrope_section") or [11, 11, 10]
