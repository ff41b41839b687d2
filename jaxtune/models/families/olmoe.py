"""OLMoE: Llama with norms on all queries and keys, and a mixture of experts in every layer."""

from typing import Any

from jaxtune.errors import UserError
from jaxtune.models.families import llama, qwen3, qwen3_moe
from jaxtune.models.structure.layer_spec import Experts
from jaxtune.models.structure.model_spec import ModelSpec

NAMES, IGNORABLE = llama.NAMES | qwen3.QK_NORMS | qwen3_moe.MIXTURE, llama.IGNORABLE
DEFAULTS = {"rms_norm_eps": 1e-5, "num_experts": 64, "num_experts_per_tok": 8}


def read_spec(config: dict[str, Any]) -> ModelSpec:
    """ModelSpec of an `OlmoeForCausalLM` config.json."""
    config = DEFAULTS | config
    if config.get("clip_qkv") is not None:
        raise UserError(f"config.json: clip_qkv={config['clip_qkv']} is not supported")
    experts = Experts(
        size=config["intermediate_size"],
        count=config["num_experts"],
        active=config["num_experts_per_tok"],
        normalized=config.get("norm_topk_prob", False),
        activation=llama.activation(config),
    )
    return llama.common_spec(
        "olmoe",
        config,
        feed_forward=experts,
        model=qwen3_moe.router_loss(config, 0.01),
        qk_norm="whole",
    )
