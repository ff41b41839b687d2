"""The text model of Gemma 4 12B: as in `gemma4_text`, with other defaults."""

from typing import Any

from jaxtune.models.families import gemma4_text
from jaxtune.models.structure.model_spec import ModelSpec

NAMES, IGNORABLE = gemma4_text.NAMES, gemma4_text.IGNORABLE
DEFAULTS = {name: value for name, value in gemma4_text.DEFAULTS.items() if "per_layer_input" not in name} | {
    "max_position_embeddings": 262_144,
    "sliding_window": 1024,
}


def read_spec(config: dict[str, Any]) -> ModelSpec:
    """ModelSpec of a `Gemma4UnifiedForCausalLM` config.json."""
    return gemma4_text.common_spec("gemma4_unified_text", DEFAULTS | config)
