"""DeepSeek-V3 and R1: latent attention; experts chosen in groups by corrected sigmoid scores, one shared."""

from typing import Any

from jaxtune.errors import UserError
from jaxtune.models.families import glm4_moe, llama, mtp_tensors, qwen3_moe
from jaxtune.models.families.entries import require
from jaxtune.models.structure.layer_spec import Experts, FeedForward
from jaxtune.models.structure.mixers import Latent, Rope
from jaxtune.models.structure.model_spec import ModelSpec

CLASSIFIER = "DeepseekV3"

ATTENTION = "model.layers.{layer}.self_attn"
LATENTS = {
    f"attention.{name}.{part}": f"{ATTENTION}.{hf}.{part}"
    for name, hf in (
        ("q_down", "q_a_proj"),
        ("q_up", "q_b_proj"),
        ("kv_down", "kv_a_proj_with_mqa"),
        ("kv_up", "kv_b_proj"),
    )
    for part in ("weight", "bias")
}
NORMS = {f"attention.{x}_norm.weight": f"{ATTENTION}.{x}_a_layernorm.weight" for x in ("q", "kv")}
NAMES = llama.NAMES | qwen3_moe.MIXTURE | glm4_moe.SHARED | glm4_moe.CORRECTION | LATENTS | NORMS
IGNORABLE, MORE_TOKENS = llama.IGNORABLE, glm4_moe.MORE_TOKENS
MTP = mtp_tensors.as_layers(NAMES)
DEFAULTS = {
    "rms_norm_eps": 1e-6,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "rope_interleave": True,
    "moe_intermediate_size": 2048,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "routed_scaling_factor": 2.5,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 3,
    "norm_topk_prob": True,
}


def read_spec(config: dict[str, Any]) -> ModelSpec:
    """ModelSpec of a `DeepseekV3ForCausalLM` config.json."""
    config = DEFAULTS | config
    require(config, scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1)
    rope = llama.read_rope(config, interleaved=config["rope_interleave"])
    return common_spec("deepseek_v3", config, rope, glm4_moe.feed_forwards(config, glm4_moe.experts(config)))


def common_spec(
    family: str, config: dict[str, Any], rope: Rope, feed_forwards: list[FeedForward | Experts]
) -> ModelSpec:
    """Return a ModelSpec with DeepSeek-V3's latent attention."""
    rotated = config["qk_rope_head_dim"]
    head_dim = config["qk_nope_head_dim"] + rotated
    if config["v_head_dim"] > head_dim:
        raise UserError(
            f"config.json: v_head_dim={config['v_head_dim']} is not supported: it is more than keys have "
            f"(qk_nope_head_dim + qk_rope_head_dim = {head_dim})"
        )
    bias = ("q_down", "kv_down", "o") if config.get("attention_bias", False) else ()
    return llama.common_spec(
        family,
        # {"head_dim" | Every query head has its own key and value, expanded from the latent.
        config | {"head_dim": head_dim, "num_key_value_heads": config["num_attention_heads"]},
        rope=rope,
        feed_forward=feed_forwards,
        bias=frozenset(bias),
        scale=head_dim**-0.5 * rope.magnitude(rope.mscale_all_dim or 0) ** 2,  # transformers: scaling * mscale**2
        latent=Latent(config["kv_lora_rank"], config["q_lora_rank"], rotated, config["v_head_dim"]),
    )
