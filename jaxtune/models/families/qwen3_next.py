"""Qwen3-Next: gated delta nets, gated attention on every fourth layer, experts, and a shared expert with a gate."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxtune.models.families import llama, mtp_tensors, qwen3, qwen3_moe
from jaxtune.models.families.entries import check_kinds
from jaxtune.models.structure.layer_spec import Experts, Norm
from jaxtune.models.structure.mixers import DeltaNet
from jaxtune.models.structure.model_spec import ModelSpec

CLASSIFIER = "Qwen3Next"

NET = "model.layers.{layer}.linear_attn"
# Queries, keys and values are parts of one convolution.
DELTA_NET = {f"delta_net.{name}_conv": f"{NET}.conv1d.weight" for name in "qkv"} | {
    "delta_net.log_rate": f"{NET}.A_log",
    "delta_net.step_bias": f"{NET}.dt_bias",
    "delta_net.norm.weight": f"{NET}.norm.weight",
    "delta_net.o.weight": f"{NET}.out_proj.weight",
}
FUSED = {f"delta_net.{name}.weight": f"{NET}.in_proj_{name}.weight" for name in ("qkvz", "ba")}
MLP = "model.layers.{layer}.mlp"
SHARED = {f"mlp.shared.{x}.weight": f"{MLP}.shared_expert.{x}_proj.weight" for x in ("gate", "up", "down")} | {
    "mlp.shared_gate.weight": f"{MLP}.shared_expert_gate.weight"
}
MIXTURE = qwen3_moe.MIXTURE | SHARED
NAMES = llama.NAMES | qwen3.QK_NORMS | DELTA_NET | FUSED | MIXTURE
IGNORABLE, MORE_TOKENS = llama.IGNORABLE, r"^mtp\."
MTP = mtp_tensors.apart(NAMES, "num_nextn_predict_layers")
MIXERS = {
    "head_dim": 256,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "partial_rotary_factor": 0.25,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
EXPERTS = {
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts_per_tok": 10,
    "num_experts": 512,
    "norm_topk_prob": True,
}
DEFAULTS = MIXERS | EXPERTS


def read_spec(config: dict[str, Any]) -> ModelSpec:
    """ModelSpec of a `Qwen3NextForCausalLM` config.json."""
    config = DEFAULTS | config
    return common_spec(
        "qwen3_next",
        config,
        fused=True,
        feed_forward=qwen3_moe.feed_forwards(config, with_shared(config)),
        model=qwen3_moe.router_loss(config, 0.001),
    )


def common_spec(family: str, config: dict[str, Any], fused: bool, axes: Sequence[int] = (), **fields: Any) -> ModelSpec:
    """Return a ModelSpec with the fields that families of Qwen3-Next share.

    axes: pairs of features that turn with each axis of rotary positions. fields: as in llama.common_spec.
    """
    spec = llama.common_spec(
        family,
        config,
        rope=llama.read_rope(
            config, fraction=llama.partial_rotary(config), axes=tuple(axes), axes_interleaved=bool(axes)
        ),
        norm=Norm(config["rms_norm_eps"], offset=True, rounded=False),  # x * (1 + weight)
        qk_norm="head",
        gated="fused",
        **fields,
    )
    return llama.change_layers(spec, layer_types(config), "linear_attention", mixer=delta_net(config, fused=fused))


def delta_net(config: dict[str, Any], **fields: Any) -> DeltaNet:
    """Return the delta net of a config; `fields`: further fields of `DeltaNet`."""
    return DeltaNet(
        key_heads=config["linear_num_key_heads"],
        value_heads=config["linear_num_value_heads"],
        key_dim=config["linear_key_head_dim"],
        value_dim=config["linear_value_head_dim"],
        kernel=config["linear_conv_kernel_dim"],
        **fields,
    )


def layer_types(config: dict[str, Any]) -> list[str]:
    """Return "full_attention" or "linear_attention" for each layer.

    Without `layer_types`, every `full_attention_interval`-th layer has full attention.
    """
    count, interval = config["num_hidden_layers"], config.get("full_attention_interval", 4)
    kinds = config.get("layer_types") or [
        "linear_attention" if (number + 1) % interval else "full_attention" for number in range(count)
    ]
    return check_kinds(config, kinds, "full_attention", "linear_attention")


def with_shared(config: dict[str, Any]) -> Experts:
    """Return the experts of a layer, with a shared expert and its gate."""
    return dataclasses.replace(
        qwen3_moe.experts(config), shared=config["shared_expert_intermediate_size"], shared_gate=True
    )
