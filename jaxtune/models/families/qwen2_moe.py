"""Qwen1.5-MoE and Qwen2-57B-A14B: Qwen2 with a mixture of experts, and a shared expert with a gate."""

from typing import Any

from jaxtune.models.families import llama, qwen2, qwen3_moe, qwen3_next
from jaxtune.models.structure.model_spec import ModelSpec

CLASSIFIER = "Qwen2Moe"

NAMES, IGNORABLE = qwen2.NAMES | qwen3_next.MIXTURE, qwen2.IGNORABLE
DEFAULTS = {
    "num_key_value_heads": 16,
    "rms_norm_eps": 1e-6,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
    "num_experts_per_tok": 4,
    "num_experts": 60,
}


def read_spec(config: dict[str, Any]) -> ModelSpec:
    """ModelSpec of a `Qwen2MoeForCausalLM` config.json."""
    config = DEFAULTS | config
    return llama.common_spec(
        "qwen2_moe",
        config,
        windows(config),
        feed_forward=qwen3_moe.feed_forwards(config, qwen3_next.with_shared(config)),
        model=qwen3_moe.router_loss(config, 0.001),
        bias=frozenset("qkv" if config.get("qkv_bias", True) else ""),
    )


def windows(config: dict[str, Any]) -> list[int | None]:
    """Return the window of each layer if `use_sliding_window` is true, else None for each.

    Without `layer_types`, every other layer before `max_window_layers` has a window, the first included.
    """
    count, end = config["num_hidden_layers"], config.get("max_window_layers", 28)
    kinds = ["full_attention" if n % 2 or n >= end else "sliding_attention" for n in range(count)]
    config = {"sliding_window": 4096} | config | {"layer_types": config.get("layer_types") or kinds}
    return llama.optional_windows(config)
