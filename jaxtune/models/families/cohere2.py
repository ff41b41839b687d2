"""Cohere's Command R7B and A: attention and feed-forward side by side after one LayerNorm; no rope without a window."""

from typing import Any

from jaxtune.models.families import llama
from jaxtune.models.structure.layer_spec import Norm
from jaxtune.models.structure.model_spec import ModelSpec

NAMES, IGNORABLE = llama.NAMES, llama.IGNORABLE
DEFAULTS = {"sliding_window": 4096, "logit_scale": 0.0625, "layer_norm_eps": 1e-5, "tie_word_embeddings": True}


def read_spec(config: dict[str, Any]) -> ModelSpec:
    """ModelSpec of a `Cohere2ForCausalLM` config.json."""
    config = DEFAULTS | config
    config = llama.every_nth_is_full(config, config.get("sliding_window_pattern") or 4)
    windows, rope = llama.windows(config), llama.read_rope(config, interleaved=True)
    return llama.common_spec(
        "cohere2",
        config,
        windows,
        [None if window is None else rope for window in windows],
        norm=Norm(config["layer_norm_eps"], centred=True, rounded=False),  # Cohere2LayerNorm: no bias
        layer={"norms": "shared"},
        model={"logit_scale": config["logit_scale"]},
    )
