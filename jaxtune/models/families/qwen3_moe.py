"""Qwen3-MoE: Qwen3 with a mixture of experts in place of the feed-forward layer, in all layers or some."""

from typing import Any

from jaxtune.models.families import llama, qwen3
from jaxtune.models.structure.layer_spec import Experts, FeedForward
from jaxtune.models.structure.model_spec import ModelSpec

CLASSIFIER = "Qwen3Moe"

MLP = "model.layers.{layer}.mlp"
EXPERTS = {
    f"mlp.experts.{name}.weight": f"{MLP}.experts.{{expert}}.{name}_proj.weight" for name in ("gate", "up", "down")
}
MIXTURE = {"mlp.router.weight": f"{MLP}.gate.weight"} | EXPERTS
NAMES, IGNORABLE = qwen3.NAMES | MIXTURE, qwen3.IGNORABLE


def read_spec(config: dict[str, Any]) -> ModelSpec:
    """ModelSpec of a `Qwen3MoeForCausalLM` config.json."""
    layers = feed_forwards(config, experts(config))
    return qwen3.common_spec("qwen3_moe", config, feed_forward=layers, model=router_loss(config, 0.001))


def experts(config: dict[str, Any]) -> Experts:
    """Return the experts of a layer."""
    return Experts(
        size=config["moe_intermediate_size"],
        count=config.get("num_experts") or config["num_local_experts"],
        active=config["num_experts_per_tok"],
        normalized=config.get("norm_topk_prob", False),
        activation=llama.activation(config),
    )


def feed_forwards(config: dict[str, Any], experts: Experts) -> list[FeedForward | Experts]:
    """Return the feed-forward of each layer: the given experts, or a dense layer."""

    def is_dense(layer: int) -> bool:
        sparse_step = config.get("decoder_sparse_step", 1)
        return layer in (config.get("mlp_only_layers") or ()) or (layer + 1) % sparse_step != 0 or not experts.count

    return [llama.dense(config) if is_dense(layer) else experts for layer in range(config["num_hidden_layers"])]


def router_loss(config: dict[str, Any], coefficient: float) -> dict[str, float]:
    """Return the `router_loss` field of ModelSpec. As in transformers, it is 0 unless output_router_logits is true."""
    has_loss = config.get("output_router_logits", False)
    return {"router_loss": config.get("router_aux_loss_coef", coefficient) if has_loss else 0.0}
