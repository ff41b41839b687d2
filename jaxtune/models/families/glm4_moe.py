"""GLM-4.5 to 4.7: experts chosen as in DeepSeek-V3, shared ones, dense first layers, half of each head rotated."""

from typing import Any

from jaxtune.models.families import llama, mtp_tensors, qwen3, qwen3_moe
from jaxtune.models.structure.layer_spec import Experts, FeedForward
from jaxtune.models.structure.model_spec import ModelSpec

SHARED = {
    f"mlp.shared.{name}.weight": f"model.layers.{{layer}}.mlp.shared_experts.{name}_proj.weight"
    for name in ("gate", "up", "down")
}
CORRECTION = {"mlp.router.correction": "model.layers.{layer}.mlp.gate.e_score_correction_bias"}
NAMES = llama.NAMES | qwen3.QK_NORMS | qwen3_moe.MIXTURE | SHARED | CORRECTION
IGNORABLE, MORE_TOKENS = llama.IGNORABLE, r"^model\.layers\.(\d+)\."
MTP = mtp_tensors.as_layers(NAMES)
DEFAULTS = {
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "partial_rotary_factor": 0.5,
    "moe_intermediate_size": 1408,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "n_routed_experts": 128,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "use_qk_norm": False,
}


def read_spec(config: dict[str, Any]) -> ModelSpec:
    """ModelSpec of a `Glm4MoeForCausalLM` config.json."""
    config = DEFAULTS | config
    rope = llama.read_rope(config, fraction=llama.partial_rotary(config))
    return llama.common_spec(
        "glm4_moe",
        config,
        rope=rope,
        feed_forward=feed_forwards(config, experts(config)),
        bias=frozenset("qkv" if config.get("attention_bias", False) else ""),
        qk_norm="head" if config["use_qk_norm"] else None,
    )


def feed_forwards(config: dict[str, Any], experts: Experts) -> list[FeedForward | Experts]:
    """Return the feed-forward of each layer: the first ones are dense, the others have the given experts."""
    dense, first = llama.dense(config), config["first_k_dense_replace"]
    return [dense if number < first else experts for number in range(config["num_hidden_layers"])]


def experts(config: dict[str, Any]) -> Experts:
    """Return the experts of a layer, as in DeepSeek-V3."""
    return Experts(
        size=config["moe_intermediate_size"],
        count=config["n_routed_experts"],
        active=config["num_experts_per_tok"],
        normalized=config["norm_topk_prob"],
        activation=llama.activation(config),
        scores="sigmoid",
        scale=config["routed_scaling_factor"],
        corrected=True,
        groups=config["n_group"],
        active_groups=config["topk_group"],
        float32=True,
        shared=config["moe_intermediate_size"] * config["n_shared_experts"],
    )
