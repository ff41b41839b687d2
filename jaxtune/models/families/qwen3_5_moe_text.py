"""Qwen3.5's text model with experts in every layer, and a shared expert with a gate."""

from typing import Any

from jaxtune.models.families import mtp_tensors, qwen3_5_text, qwen3_moe, qwen3_next
from jaxtune.models.structure.model_spec import ModelSpec

NAMES = qwen3_5_text.NAMES | qwen3_next.MIXTURE
IGNORABLE, MORE_TOKENS = qwen3_next.IGNORABLE, qwen3_next.MORE_TOKENS
MTP = mtp_tensors.apart(NAMES, "mtp_num_hidden_layers")
DEFAULTS = qwen3_next.DEFAULTS | {"num_experts": 256, "num_experts_per_tok": 8}


def read_spec(config: dict[str, Any]) -> ModelSpec:
    """ModelSpec of a `Qwen3_5MoeForCausalLM` config.json."""
    config = DEFAULTS | config
    return qwen3_next.common_spec(
        "qwen3_5_moe_text",
        config,
        fused=False,
        axes=qwen3_5_text.axes(config),
        feed_forward=qwen3_next.with_shared(config),
        model=qwen3_moe.router_loss(config, 0.001),
    )
