"""gpt-oss: experts with biases and a clamped activation, windows on every other layer, and attention sinks."""

from typing import Any

from jaxtune.models.families import llama, qwen3_moe
from jaxtune.models.places import Tensor
from jaxtune.models.structure.layer_spec import ClampedSilu, Experts, Norm
from jaxtune.models.structure.model_spec import ModelSpec

CLASSIFIER = "GptOss"

MLP = "model.layers.{layer}.mlp"
# Rows of gate and up alternate in one tensor.
EXPERTS = {
    f"mlp.experts.{name}.{part}": Tensor(
        f"{MLP}.experts.{hf}_proj{ending}", stacked=True, transposed=True, interleaved=True
    )
    for name, hf in (("gate", "gate_up"), ("up", "gate_up"), ("down", "down"))
    for part, ending in (("weight", ""), ("bias", "_bias"))
}
ROUTER = {f"mlp.router.{part}": f"{MLP}.router.{part}" for part in ("weight", "bias")}
SINKS = {"attention.sinks": "model.layers.{layer}.self_attn.sinks"}
NAMES, IGNORABLE = llama.NAMES | ROUTER | EXPERTS | SINKS, llama.IGNORABLE
ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
DEFAULTS = {
    "head_dim": 64,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "attention_bias": True,
    "sliding_window": 128,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
}


def read_spec(config: dict[str, Any]) -> ModelSpec:
    """ModelSpec of a `GptOssForCausalLM` config.json."""
    config = llama.every_nth_is_full(DEFAULTS | config, 2)
    if not (config.get("rope_parameters") or config.get("rope_scaling")):
        config = config | {"rope_parameters": ROPE}
    experts = Experts(
        size=config["intermediate_size"],
        count=config["num_local_experts"],
        active=config["num_experts_per_tok"],
        normalized=True,
        activation=ClampedSilu(config["swiglu_alpha"], config["swiglu_limit"]),
        router_bias=True,
        bias=True,
    )
    return llama.common_spec(
        "gpt_oss",
        config,
        llama.windows(config),
        llama.read_rope(config, theta=150_000.0),
        experts,
        norm=Norm(config["rms_norm_eps"], rounded=False),  # GptOssRMSNorm rounds after the weight
        model=qwen3_moe.router_loss(config, 0.001),
        sinks=True,
    )
