"""Gemma 3 with vision: the text decoder only, as in `gemma3_text`."""

import dataclasses
from typing import Any

from jaxtune.models.families import gemma3_text, vision_wrapper
from jaxtune.models.spec import ModelSpec

NAMES, IGNORABLE = vision_wrapper.names(gemma3_text.NAMES), gemma3_text.IGNORABLE
UNTOUCHED = r"^(model\.)?(vision_tower|multi_modal_projector)\."


def read_spec(config: dict[str, Any]) -> ModelSpec:
    """ModelSpec of the decoder of a `Gemma3ForConditionalGeneration` config.json."""
    spec = vision_wrapper.read_spec(
        "gemma3", config, {"gemma3_text": gemma3_text.read_spec}, untouched=UNTOUCHED, tied=True
    )
    # transformers caps the logits only in the text model, not in this class.
    return dataclasses.replace(spec, logit_cap=None)
