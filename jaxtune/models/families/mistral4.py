"""Mistral Small 4: latent attention as in DeepSeek-V3, growing queries as in Ministral 3, experts with a shared one."""

import dataclasses
from typing import Any

from jaxtune.models.families import deepseek_v3, glm4_moe, llama
from jaxtune.models.families.entries import Entries, require
from jaxtune.models.places import Tensor
from jaxtune.models.structure.mixers import Rope
from jaxtune.models.structure.model_spec import ModelSpec

CLASSIFIER = "Mistral4"

MLP = "model.layers.{layer}.mlp"
GATE_UP = Tensor(f"{MLP}.experts.gate_up_proj", stacked=True)
EXPERTS = {
    "mlp.experts.gate.weight": GATE_UP,
    "mlp.experts.up.weight": GATE_UP,
    "mlp.experts.down.weight": Tensor(f"{MLP}.experts.down_proj", stacked=True),
}
NAMES = {name: hf for name, hf in deepseek_v3.NAMES.items() if name != "mlp.router.correction"} | EXPERTS
IGNORABLE = deepseek_v3.IGNORABLE
ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}
DEFAULTS = {
    "vocab_size": 131_072,
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "max_position_embeddings": 1_048_576,
    "rms_norm_eps": 1e-6,
    "kv_lora_rank": 256,
    "q_lora_rank": 1024,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 64,
    "v_head_dim": 128,
    "rope_interleave": True,
    "moe_intermediate_size": 2048,
    "num_experts_per_tok": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 128,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 0,
    "norm_topk_prob": True,
}


def read_spec(config: dict[str, Any]) -> ModelSpec:
    """ModelSpec of a `Mistral4ForCausalLM` config.json."""
    config = DEFAULTS | config
    require(config, scoring_func="softmax", moe_layer_freq=1)
    experts = dataclasses.replace(glm4_moe.experts(config), scores="softmax", corrected=False, float32=False)
    return deepseek_v3.common_spec("mistral4", config, read_rope(config), glm4_moe.feed_forwards(config, experts))


def read_rope(config: dict[str, Any]) -> Rope:
    """Return the rope of the rotated features of each head. Its fraction in the config must be theirs."""
    values = Entries(config.get("rope_parameters") or config.get("rope_scaling") or ROPE)
    rotated = config["qk_rope_head_dim"] / (config["qk_rope_head_dim"] + config["qk_nope_head_dim"])
    require(values, partial_rotary_factor=rotated)
    whole = {name: value for name, value in values.items() if name != "partial_rotary_factor"}
    return llama.read_rope(
        config | {"rope_parameters": whole, "partial_rotary_factor": 1.0},
        interleaved=config["rope_interleave"],
        query_growth=values.get("llama_4_scaling_beta", 0.0),
    )
