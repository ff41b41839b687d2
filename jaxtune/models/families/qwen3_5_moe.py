"""Qwen3.5 with experts and vision: the text decoder only, as in `qwen3_5_moe_text`."""

from typing import Any

from jaxtune.models.families import qwen3_5, qwen3_5_moe_text, vision_wrapper
from jaxtune.models.structure.model_spec import ModelSpec

NAMES, IGNORABLE = vision_wrapper.names(qwen3_5_moe_text.NAMES), qwen3_5_moe_text.IGNORABLE
MTP, VISION = qwen3_5_moe_text.MTP, qwen3_5.VISION


def read_spec(config: dict[str, Any]) -> ModelSpec:
    """ModelSpec of the decoder of a `Qwen3_5MoeForConditionalGeneration` config.json."""
    decoders = {"qwen3_5_moe_text": qwen3_5_moe_text.read_spec}
    return vision_wrapper.read_spec("qwen3_5_moe", config, decoders, untouched=qwen3_5.UNTOUCHED, tied=False)
