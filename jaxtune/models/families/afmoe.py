"""Trinity (AFMoE): attention with gates, no rope without a window, norms before and after, sigmoid experts."""

from typing import Any

from jaxtune.models.families import gemma2, glm4_moe, llama, qwen3, qwen3_moe
from jaxtune.models.families.entries import require
from jaxtune.models.structure.layer_spec import Experts, Norm
from jaxtune.models.structure.model_spec import ModelSpec

NORMS = {name: hf.replace("feedforward", "mlp") for name, hf in gemma2.NORMS.items()}
ROUTER = {
    "mlp.router.weight": "model.layers.{layer}.mlp.router.gate.weight",
    "mlp.router.correction": "model.layers.{layer}.mlp.expert_bias",
}
NAMES = (
    llama.NAMES
    | {"attention.gate.weight": "model.layers.{layer}.self_attn.gate_proj.weight"}
    | NORMS
    | qwen3.QK_NORMS
    | qwen3_moe.EXPERTS
    | glm4_moe.SHARED
    | ROUTER
)
IGNORABLE = llama.IGNORABLE
DEFAULTS = {
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "sliding_window": 1024,
    "global_attn_every_n_layers": 4,
    "mup_enabled": False,
    "num_dense_layers": 1,
    "moe_intermediate_size": 1408,
    "num_experts": 64,
    "num_experts_per_tok": 6,
    "num_shared_experts": 2,
    "route_scale": 1.0,
}


def read_spec(config: dict[str, Any]) -> ModelSpec:
    """ModelSpec of an `AfmoeForCausalLM` config.json."""
    config = DEFAULTS | config
    # Entries of published files that transformers does not read.
    require(config, score_func="sigmoid", route_norm=True, n_group=1, topk_group=1)
    require(config, num_expert_groups=1, num_limited_groups=1)
    config = llama.every_nth_is_full(config, config["global_attn_every_n_layers"])
    rope, size = llama.read_rope(config), config["moe_intermediate_size"]
    experts = Experts(
        size=size,
        count=config["num_experts"],
        active=config["num_experts_per_tok"],
        normalized=True,
        activation=llama.activation(config),
        scores="sigmoid",
        scale=config["route_scale"],
        corrected=True,
        shared=size * config["num_shared_experts"],
    )
    return llama.common_spec(
        "afmoe",
        config,
        llama.windows(config),
        [rope if kind == "sliding_attention" else None for kind in llama.layer_types(config)],
        glm4_moe.feed_forwards(config | {"first_k_dense_replace": config["num_dense_layers"]}, experts),
        norm=Norm(config["rms_norm_eps"], rounded=False),  # AfmoeRMSNorm rounds after the weight
        layer={"norms": "both"},
        model={"embedding_scale": config["hidden_size"] ** 0.5 if config["mup_enabled"] else 1.0},
        qk_norm="head",
        gated="separate",
    )
