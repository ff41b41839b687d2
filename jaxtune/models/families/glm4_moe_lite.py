"""GLM-4.7-Flash: latent attention as in DeepSeek-V3, experts as in GLM-4.5."""

from typing import Any

from jaxtune.errors import UserError
from jaxtune.models.families import deepseek_v3, glm4_moe, llama
from jaxtune.models.families.entries import check_kinds, require
from jaxtune.models.structure.layer_spec import Experts, FeedForward
from jaxtune.models.structure.model_spec import ModelSpec

NAMES, IGNORABLE, MORE_TOKENS = deepseek_v3.NAMES, deepseek_v3.IGNORABLE, glm4_moe.MORE_TOKENS
MTP = deepseek_v3.MTP
DEFAULTS = {
    "rms_norm_eps": 1e-5,
    "kv_lora_rank": 512,
    "q_lora_rank": 768,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "rope_interleave": True,
    "moe_intermediate_size": 1536,
    "num_experts_per_tok": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 64,
    "routed_scaling_factor": 1.8,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
}


def read_spec(config: dict[str, Any]) -> ModelSpec:
    """ModelSpec of a `Glm4MoeLiteForCausalLM` config.json."""
    config = DEFAULTS | config
    require(config, topk_method="noaux_tc")
    first, count = config.get("first_k_dense_replace"), config["num_hidden_layers"]
    kinds = config.get("mlp_layer_types") or ["dense"] + ["sparse"] * (count - 1)
    # transformers does not read first_k_dense_replace, which is in published files.
    if first is not None and kinds != ["dense"] * first + ["sparse"] * (count - first):
        raise UserError(f"config.json: first_k_dense_replace={first} contradicts mlp_layer_types; set mlp_layer_types")
    rope = llama.read_rope(config, interleaved=config["rope_interleave"])
    layers = feed_forwards(config | {"mlp_layer_types": kinds}, glm4_moe.experts(config))
    return deepseek_v3.common_spec("glm4_moe_lite", config, rope, layers)


def feed_forwards(config: dict[str, Any], experts: Experts) -> list[FeedForward | Experts]:
    """Return the feed-forward of each layer: dense or the given experts, by `mlp_layer_types`."""
    if not (kinds := config.get("mlp_layer_types")):
        return glm4_moe.feed_forwards(config, experts)
    kinds = check_kinds(config, kinds, "dense", "sparse", entry="mlp_layer_types")
    return [llama.dense(config) if kind == "dense" else experts for kind in kinds]
