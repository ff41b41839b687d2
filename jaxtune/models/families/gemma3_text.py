"""Gemma 3's text model: Gemma 2 with norms on queries and keys in place of soft caps, and a rope for windows."""

from typing import Any

from jaxtune.models.families import gemma2, llama, qwen3
from jaxtune.models.structure.model_spec import ModelSpec

CLASSIFIER = "Gemma3Text"

NAMES, IGNORABLE = gemma2.NAMES | qwen3.QK_NORMS, llama.IGNORABLE
DEFAULTS = gemma2.DEFAULTS | {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "max_position_embeddings": 131_072,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
}


def read_spec(config: dict[str, Any]) -> ModelSpec:
    """ModelSpec of a `Gemma3ForCausalLM` config.json."""
    config = llama.every_nth_is_full(DEFAULTS | config, config.get("sliding_window_pattern") or 6)
    # transformers reads this field for this family but does not use it.
    config = config | {"attn_logit_softcapping": None}
    return gemma2.common_spec("gemma3_text", config, llama.ropes_by_kind(config, 1e6, 1e4), qk_norm="head")
