"""GLM-4: norms before and after, half of each head rotated in interleaved pairs, gate and up in one tensor."""

from typing import Any

from jaxtune.models.families import llama, phi3
from jaxtune.models.structure.model_spec import ModelSpec

CLASSIFIER = "Glm4"

NORMS = {
    "attention_out_norm.weight": "model.layers.{layer}.post_self_attn_layernorm.weight",
    "mlp_out_norm.weight": "model.layers.{layer}.post_mlp_layernorm.weight",
}
FUSED = {f"mlp.{name}.weight": phi3.GATE_UP for name in ("gate", "up")}
NAMES, IGNORABLE = llama.NAMES | NORMS | FUSED, llama.IGNORABLE
DEFAULTS = {
    "head_dim": 128,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1.5625e-7,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
}


def read_spec(config: dict[str, Any]) -> ModelSpec:
    """ModelSpec of a `Glm4ForCausalLM` config.json."""
    config = DEFAULTS | config
    rope = llama.read_rope(config, interleaved=True, fraction=llama.partial_rotary(config))
    return llama.common_spec(
        "glm4",
        config,
        rope=rope,
        layer={"norms": "both"},
        bias=frozenset("qkv" if config["attention_bias"] else ""),
    )
