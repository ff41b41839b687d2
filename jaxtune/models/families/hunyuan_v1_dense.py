"""HunYuan V1 dense (Hunyuan 0.5B to 7B, Hunyuan-MT): Llama with norms on queries and keys after their rotation."""

import dataclasses
from typing import Any

from jaxtune.models.families import llama
from jaxtune.models.families.entries import require
from jaxtune.models.structure.model_spec import ModelSpec

CLASSIFIER = "HunYuanDenseV1"

QK_NORMS = {
    f"attention.{x}_norm.weight": f"model.layers.{{layer}}.self_attn.{name}_layernorm.weight"
    for x, name in (("q", "query"), ("k", "key"))
}
NAMES, IGNORABLE = llama.NAMES | QK_NORMS, llama.IGNORABLE
DEFAULTS = {"rms_norm_eps": 1e-5}


def read_spec(config: dict[str, Any]) -> ModelSpec:
    """ModelSpec of a `HunYuanDenseV1ForCausalLM` config.json."""
    config = DEFAULTS | config
    # Entries of published files that transformers does not read.
    require(config, use_qk_norm=True, use_cla=False, mlp_bias=False, use_rotary_pos_emb=True)
    rope = llama.read_rope(config)
    nested = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.kind == "dynamic" and (alpha := nested.get("alpha")):
        # A fixed alpha raises theta once, for documents of any length; `factor` has no effect.
        head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        theta = rope.theta * alpha ** (head_dim / (head_dim - 2))
        rope = dataclasses.replace(rope, theta=theta, kind="default", factor=1.0)
    return llama.common_spec("hunyuan_v1_dense", config, rope=rope, qk_norm="rotated")
