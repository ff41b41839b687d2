"""Granite 3 with a mixture of experts in every layer, which are stacked in one tensor."""

from typing import Any

from jaxtune.models.families import granite, llama, qwen3_moe
from jaxtune.models.places import Tensor
from jaxtune.models.structure.layer_spec import Experts
from jaxtune.models.structure.model_spec import ModelSpec

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
    return common_spec("granitemoe", config)


def common_spec(family: str, config: dict[str, Any], shared: int = 0, **fields: Any) -> ModelSpec:
    """Return a ModelSpec with experts in every layer.

    shared: hidden features of a shared expert, 0 for none. fields: as in llama.common_spec.
    """
    experts = Experts(
        size=config["intermediate_size"],
        count=config.get("num_local_experts", 8),
        active=config.get("num_experts_per_tok", 2),
        normalized=True,
        activation=llama.activation(config),
        shared=shared,
    )
    model = qwen3_moe.router_loss(config, 0.001)
    return granite.common_spec(family, config, feed_forward=experts, model=model, **fields)
