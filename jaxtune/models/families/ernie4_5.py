"""ERNIE 4.5: Llama whose rope rotates interleaved pairs."""

from typing import Any

from jaxtune.models.families import llama
from jaxtune.models.structure.mixers import Rope
from jaxtune.models.structure.model_spec import ModelSpec

NAMES, IGNORABLE = llama.NAMES, llama.IGNORABLE
DEFAULTS = {"head_dim": 128, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "tie_word_embeddings": True}


def read_spec(config: dict[str, Any]) -> ModelSpec:
    """ModelSpec of an `Ernie4_5ForCausalLM` config.json."""
    config = DEFAULTS | config
    bias = config.get("use_bias") or False
    return llama.common_spec(
        "ernie4_5",
        config,
        rope=rope(config),
        mlp_bias=bias,
        bias=frozenset("qkvo" if bias else ""),
    )


def rope(config: dict[str, Any]) -> Rope:
    """Return the rope of ERNIE 4.5, with experts or without."""
    return llama.read_rope(config, theta=5e5, interleaved=True)
