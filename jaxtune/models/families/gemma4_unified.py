"""Gemma 4 12B, which embeds images and sound without encoders: the text decoder only, as in `gemma4_unified_text`."""

from typing import Any

from jaxtune.models.families import gemma4_unified_text, vision_wrapper
from jaxtune.models.structure.model_spec import ModelSpec

NAMES, IGNORABLE = vision_wrapper.names(gemma4_unified_text.NAMES), gemma4_unified_text.IGNORABLE
UNTOUCHED = r"^model\.(vision_embedder|embed_vision|embed_audio)\."
DECODERS = {"gemma4_unified_text": gemma4_unified_text.read_spec}


def read_spec(config: dict[str, Any]) -> ModelSpec:
    """ModelSpec of the decoder of a `Gemma4UnifiedForConditionalGeneration` config.json."""
    return vision_wrapper.read_spec("gemma4_unified", config, DECODERS, untouched=UNTOUCHED, tied=True)
