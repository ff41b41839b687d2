"""Mixtral: Mistral with a mixture of experts in every layer, weighted by a softmax over the chosen ones."""

from typing import Any

from jaxtune.errors import UserError
from jaxtune.models.families import llama, qwen3_moe
from jaxtune.models.structure.layer_spec import Experts
from jaxtune.models.structure.model_spec import ModelSpec

CLASSIFIER = "Mixtral"

MOE = "model.layers.{layer}.block_sparse_moe"
EXPERTS = {
    f"mlp.experts.{name}.weight": f"{MOE}.experts.{{expert}}.{hf}.weight"
    for name, hf in (("gate", "w1"), ("down", "w2"), ("up", "w3"))
}
NAMES = llama.NAMES_WITHOUT_BIAS | {"mlp.router.weight": f"{MOE}.gate.weight"} | EXPERTS
IGNORABLE = llama.IGNORABLE
DEFAULTS = {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "num_local_experts": 8, "num_experts_per_tok": 2}


def read_spec(config: dict[str, Any]) -> ModelSpec:
    """ModelSpec of a `MixtralForCausalLM` config.json."""
    config = DEFAULTS | config
    if config.get("router_jitter_noise"):
        raise UserError(
            f"config.json: router_jitter_noise={config['router_jitter_noise']} is not supported: set it to 0"
        )
    experts = Experts(
        size=config["intermediate_size"],
        count=config["num_local_experts"],
        active=config["num_experts_per_tok"],
        normalized=True,
        activation=llama.activation(config),
    )
    return llama.common_spec(
        "mixtral",
        config,
        config.get("sliding_window"),
        llama.read_rope(config, theta=1e6),
        experts,
        model=qwen3_moe.router_loss(config, 0.001),
    )
