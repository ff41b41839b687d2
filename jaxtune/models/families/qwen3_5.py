"""Qwen3.5 with vision: the text decoder only, as in `qwen3_5_text`."""

from typing import Any

from jaxtune.models.families import qwen3_5_text, qwen_vision, vision_wrapper
from jaxtune.models.structure.model_spec import ModelSpec

NAMES, IGNORABLE = vision_wrapper.names(qwen3_5_text.NAMES), qwen3_5_text.IGNORABLE
UNTOUCHED = r"^(model\.visual|mtp)\."
MTP, VISION = qwen3_5_text.MTP, qwen_vision.tensors(248056, deepstack_visual_indexes=[])


def read_spec(config: dict[str, Any]) -> ModelSpec:
    """ModelSpec of the decoder of a `Qwen3_5ForConditionalGeneration` config.json."""
    return vision_wrapper.read_spec(
        "qwen3_5", config, {"qwen3_5_text": qwen3_5_text.read_spec}, untouched=UNTOUCHED, tied=False
    )
