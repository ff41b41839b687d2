"""Mistral Small 3.1 to 4 and Ministral 3, with vision: only the decoder, as `mistral`, `ministral3` or `mistral4`."""

from typing import Any

from jaxtune.models.families import ministral3, mistral, mistral4, vision_wrapper
from jaxtune.models.spec import ModelSpec

NAMES, IGNORABLE = vision_wrapper.names(mistral.NAMES | mistral4.NAMES), mistral.IGNORABLE
UNTOUCHED = r"^(model\.)?(vision_tower|multi_modal_projector)\."


def read_spec(config: dict[str, Any]) -> ModelSpec:
    """ModelSpec of the decoder of a `Mistral3ForConditionalGeneration` config.json."""
    decoders = {"mistral": mistral.read_spec, "ministral3": ministral3.read_spec, "mistral4": mistral4.read_spec}
    return vision_wrapper.read_spec("mistral3", config, decoders, untouched=UNTOUCHED, tied=True)
