"""Qwen3-MoE: Qwen3 with a mixture of experts in place of the feed-forward layer, in all layers or some."""

from typing import Any

from jaxtune.models.families import llama, qwen3
from jaxtune.models.spec import Experts, FeedForward, ModelSpec

MLP = "model.layers.{layer}.mlp"
EXPERTS = {
    f"mlp.experts.{name}.weight": f"{MLP}.experts.{{expert}}.{name}_proj.weight" for name in ("gate", "up", "down")
}
NAMES, IGNORABLE = qwen3.NAMES | {"mlp.router.weight": f"{MLP}.gate.weight"} | EXPERTS, qwen3.IGNORABLE


def read_spec(config: dict[str, Any]) -> ModelSpec:
    """ModelSpec of a `Qwen3MoeForCausalLM` config.json."""
    activation = llama.activation(config)
    dense = FeedForward(config["intermediate_size"], activation=activation)
    experts = Experts(
        size=config["moe_intermediate_size"],
        count=config.get("num_experts") or config["num_local_experts"],
        active=config["num_experts_per_tok"],
        normalized=config.get("norm_topk_prob", False),
        activation=activation,
    )

    def feed_forward(layer: int) -> FeedForward | Experts:
        is_dense = layer in config.get("mlp_only_layers", ()) or (layer + 1) % config.get("decoder_sparse_step", 1)
        return dense if is_dense or not experts.count else experts

    layers = [feed_forward(layer) for layer in range(config["num_hidden_layers"])]
    # transformers adds it where the router's logits are asked for, and only then.
    weight = config.get("router_aux_loss_coef", 0.001) if config.get("output_router_logits", False) else 0.0
    return qwen3.common_spec("qwen3_moe", config, feed_forwards=layers, model={"router_loss": weight})
