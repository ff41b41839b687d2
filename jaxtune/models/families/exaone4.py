"""EXAONE 4: norms after attention and feed-forward, and of each head; no rope on layers without a window."""

from typing import Any

from jaxtune.models.families import llama, olmo2
from jaxtune.models.structure.model_spec import ModelSpec

CLASSIFIER = "Exaone4"

NAMES, IGNORABLE = olmo2.NAMES, olmo2.IGNORABLE
DEFAULTS = {"sliding_window": 4096, "num_key_value_heads": 32, "rms_norm_eps": 1e-5}


def read_spec(config: dict[str, Any]) -> ModelSpec:
    """ModelSpec of an `Exaone4ForCausalLM` config.json."""
    return common_spec("exaone4", DEFAULTS | config, layer={"norms": "after"})


def common_spec(family: str, config: dict[str, Any], **fields: Any) -> ModelSpec:
    """Return a ModelSpec with EXAONE 4's attention; `fields` as in llama.common_spec."""
    rope, windowed = llama.read_rope(config), config["sliding_window"] is not None
    windows = llama.windows(llama.every_nth_is_full(config, config.get("sliding_window_pattern") or 4))
    return llama.common_spec(
        family,
        config,
        windows,
        [rope if window is not None or not windowed else None for window in windows],
        qk_norm="head",
        **fields,
    )
