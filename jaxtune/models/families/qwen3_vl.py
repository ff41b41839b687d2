"""Qwen3-VL: Qwen3 with rotary positions in three axes, and a vision tower."""

from typing import Any

from jaxtune.models.families import llama, qwen3, qwen_vision, vision_wrapper
from jaxtune.models.structure.mixers import Rope
from jaxtune.models.structure.model_spec import ModelSpec

NAMES, IGNORABLE = vision_wrapper.names(qwen3.NAMES), qwen3.IGNORABLE
UNTOUCHED, VISION = qwen_vision.TENSORS, qwen_vision.tensors(151655)
DEFAULTS = {"head_dim": 128, "rms_norm_eps": 1e-6, "max_position_embeddings": 128_000}


def read_spec(config: dict[str, Any]) -> ModelSpec:
    """ModelSpec of the decoder of a `Qwen3VLForConditionalGeneration` config.json."""
    return vision_wrapper.read_spec("qwen3_vl", config, {"qwen3_vl_text": read_text}, untouched=UNTOUCHED, tied=False)


def read_text(config: dict[str, Any]) -> ModelSpec:
    """ModelSpec of a `Qwen3VLTextModel` config.json."""
    config = DEFAULTS | config
    return llama.common_spec("qwen3_vl", config, rope=three_axes(config, 5e5, [24, 20, 20]), qk_norm="head")


def three_axes(config: dict[str, Any], theta: float, pairs: list[int], interleaved: bool = True, **fields: Any) -> Rope:
    """Return a rope whose pairs are divided between time, height and width; pairs: the default of mrope_section."""
    axes = tuple(llama.rope_entries(config).get("mrope_section") or pairs)
    return llama.read_rope(config, theta, axes=axes, axes_interleaved=interleaved, **fields)
