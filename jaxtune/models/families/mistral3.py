"""Mistral Small 3.1 and 3.2, and Ministral 3, with vision: the text decoder only, as in `mistral` or `ministral3`."""

from typing import Any

from jaxtune.models.families import ministral3, mistral, vision_wrapper
from jaxtune.models.spec import ModelSpec

NAMES, IGNORABLE = vision_wrapper.names(mistral.NAMES), mistral.IGNORABLE
UNTOUCHED = r"^(model\.)?(vision_tower|multi_modal_projector)\."


def read_spec(config: dict[str, Any]) -> ModelSpec:
    """ModelSpec of the decoder of a `Mistral3ForConditionalGeneration` config.json."""
    decoders = {"mistral": mistral, "ministral3": ministral3}
    return vision_wrapper.read_spec("mistral3", config, decoders, untouched=UNTOUCHED, tied=True)
