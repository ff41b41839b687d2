"""OLMo 3: OLMo 2 with a window on three of four layers, whose rope is not stretched."""

from typing import Any

from jaxtune.models.families import llama, olmo2
from jaxtune.models.structure.model_spec import ModelSpec

CLASSIFIER = "Olmo3"

NAMES, IGNORABLE = olmo2.NAMES, olmo2.IGNORABLE


def read_spec(config: dict[str, Any]) -> ModelSpec:
    """ModelSpec of an `Olmo3ForCausalLM` config.json."""
    config = llama.every_nth_is_full({"sliding_window": 4096} | config, 4)
    theta = config.get("rope_theta", 5e5)
    ropes = llama.ropes_by_kind(config, theta, theta)
    return olmo2.common_spec("olmo3", config, window=llama.windows(config), rope=ropes)
