"""MiniMax M2: experts chosen by corrected sigmoid scores, norms on all queries and keys, half of each head rotated."""

from typing import Any

from jaxtune.errors import UserError
from jaxtune.models.families import llama, mixtral, qwen3
from jaxtune.models.families.entries import require
from jaxtune.models.structure.layer_spec import Experts
from jaxtune.models.structure.model_spec import ModelSpec

NAMES = mixtral.NAMES | qwen3.QK_NORMS | {"mlp.router.correction": f"{mixtral.MOE}.e_score_correction_bias"}
IGNORABLE = llama.IGNORABLE
DEFAULTS = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "num_local_experts": 256,
    "num_experts_per_tok": 8,
}


def read_spec(config: dict[str, Any]) -> ModelSpec:
    """ModelSpec of a `MiniMaxM2ForCausalLM` config.json."""
    config = DEFAULTS | config
    require(config, use_qk_norm=True, qk_norm_type="per_layer", scoring_func="sigmoid", use_routing_bias=True)
    require(config, shared_intermediate_size=0, attention_bias=False, router_jitter_noise=0.0)
    # transformers' loss then balances a softmax without the correction, but the router chooses by corrected sigmoids.
    require(config, output_router_logits=False)
    if any(kind != 1 for kind in config.get("attn_type_list", ())):
        raise UserError("config.json: attn_type_list has layers that are not 1; only softmax attention is supported")
    head_dim = config["head_dim"] or config["hidden_size"] // config["num_attention_heads"]
    # Published files have rotary_dim, the number of rotated features.
    config = {"partial_rotary_factor": config.get("rotary_dim", head_dim) / head_dim} | config
    experts = Experts(
        size=config["intermediate_size"],
        count=config["num_local_experts"],
        active=config["num_experts_per_tok"],
        normalized=True,
        activation=llama.activation(config),
        scores="sigmoid",
        corrected=True,
    )
    return llama.common_spec(
        "minimax_m2",
        config,
        rope=llama.read_rope(config, theta=5e6, fraction=llama.partial_rotary(config)),
        feed_forward=experts,
        qk_norm="whole",
    )
