"""Gemma 4 with vision and audio: the text decoder only, as in `gemma4_text`."""

from typing import Any

from jaxtune.models.families import gemma4_text, vision_wrapper
from jaxtune.models.structure.model_spec import ModelSpec

NAMES, IGNORABLE = vision_wrapper.names(gemma4_text.NAMES), gemma4_text.IGNORABLE
UNTOUCHED = r"^model\.(vision_tower|audio_tower|embed_vision|embed_audio)\."


def read_spec(config: dict[str, Any]) -> ModelSpec:
    """ModelSpec of the decoder of a `Gemma4ForConditionalGeneration` config.json."""
    return vision_wrapper.read_spec(
        "gemma4", config, {"gemma4_text": gemma4_text.read_spec}, untouched=UNTOUCHED, tied=True
    )
