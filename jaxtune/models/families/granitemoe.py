"""Granite 3 with a mixture of experts in every layer, which are stacked in one tensor."""

from typing import Any

from jaxtune.models.families import granite, llama, qwen3_moe
from jaxtune.models.places import Tensor
from jaxtune.models.spec import Experts, ModelSpec

MOE = "model.layers.{layer}.block_sparse_moe"
GATE_UP = Tensor(f"{MOE}.input_linear.weight", stacked=True, loaded=f"{MOE}.experts.gate_up_proj")
DOWN = Tensor(f"{MOE}.output_linear.weight", stacked=True, loaded=f"{MOE}.experts.down_proj")
NAMES = llama.NAMES | {
    "mlp.router.weight": f"{MOE}.router.layer.weight",
    "mlp.experts.gate.weight": GATE_UP,
    "mlp.experts.up.weight": GATE_UP,
    "mlp.experts.down.weight": DOWN,
}
IGNORABLE = llama.IGNORABLE


def read_spec(config: dict[str, Any]) -> ModelSpec:
    """ModelSpec of a `GraniteMoeForCausalLM` config.json."""
    experts = Experts(
        size=config["intermediate_size"],
        count=config.get("num_local_experts", 8),
        active=config.get("num_experts_per_tok", 2),
        normalized=True,
        activation=llama.activation(config),
    )
    return granite.common_spec("granitemoe", config, feed_forward=experts, model=qwen3_moe.router_loss(config, 0.001))
