"""Gemma 4's text model (26B-A4B, 31B): wide global layers, norms of values, keys as values, experts and an MLP."""

import dataclasses
from typing import Any, cast

from jaxtune.errors import UserError
from jaxtune.models.families import gemma3_text, llama
from jaxtune.models.mixers import Heads
from jaxtune.models.places import Tensor
from jaxtune.models.spec import Experts, FeedForward, ModelSpec, Norm

LAYER = "model.layers.{layer}"
GATE_UP = Tensor(f"{LAYER}.experts.gate_up_proj", stacked=True)
MIXTURE = {
    **{f"mlp.shared.{name}.weight": f"{LAYER}.mlp.{name}_proj.weight" for name in ("gate", "up", "down")},
    "mlp.shared_out_norm.weight": f"{LAYER}.post_feedforward_layernorm_1.weight",
    "mlp.router.weight": f"{LAYER}.router.proj.weight",
    "mlp.router.scale": f"{LAYER}.router.scale",
    "mlp.router.expert_scale": f"{LAYER}.router.per_expert_scale",
    "mlp.experts_norm.weight": f"{LAYER}.pre_feedforward_layernorm_2.weight",
    "mlp.experts.gate.weight": GATE_UP,
    "mlp.experts.up.weight": GATE_UP,
    "mlp.experts.down.weight": Tensor(f"{LAYER}.experts.down_proj", stacked=True),
    "mlp.experts_out_norm.weight": f"{LAYER}.post_feedforward_layernorm_2.weight",
}
NAMES, IGNORABLE = gemma3_text.NAMES | MIXTURE | {"scale": f"{LAYER}.layer_scalar"}, llama.IGNORABLE
DEFAULTS = {
    "vocab_size": 262_144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "sliding_window": 512,
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
}
PER_LAYER = {"head_dim": "head_dim", "num_key_value_heads": "kv_heads"}
ROPES = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    "sliding_attention": {"rope_theta": 1e4},
}


def read_spec(config: dict[str, Any]) -> ModelSpec:
    """ModelSpec of a `Gemma4ForCausalLM` config.json."""
    # transformers' class has embeddings for each layer unless an entry says otherwise.
    if size := config.get("hidden_size_per_layer_input", 256):
        raise UserError(
            f"config.json: hidden_size_per_layer_input={size}: embeddings for each layer, which Gemma 4 E2B and E4B "
            "have, are not supported"
        )
    return common_spec("gemma4_text", DEFAULTS | config)


def common_spec(family: str, config: dict[str, Any]) -> ModelSpec:
    """Return a ModelSpec with the fields that Gemma 4's text models share."""
    config = llama.every_nth_is_full(config, 6)
    config = config | {"layer_types": [*config["layer_types"][:-1], "full_attention"]}  # as transformers does
    config = config | {"rope_parameters": config.get("rope_parameters") or ROPES}
    if count := config.get("num_kv_shared_layers", 0):
        raise UserError(
            f"config.json: num_kv_shared_layers={count}: layers that take keys and values from others, which Gemma 4 "
            "E2B and E4B have, are not supported"
        )
    if config.get("use_bidirectional_attention") not in (None, False, "vision"):  # "vision": only images
        raise UserError("config.json: use_bidirectional_attention='all' is not supported: attention here is causal")
    activation = llama.activation(config, "hidden_activation")
    feed_forward: FeedForward | Experts = FeedForward(config["intermediate_size"], activation=activation)
    if config.get("enable_moe_block", False):
        feed_forward = Experts(
            size=config["moe_intermediate_size"],
            count=config["num_experts"],
            active=config["top_k_experts"],
            normalized=True,
            activation=activation,
            shared=config["intermediate_size"],
            parallel=True,
        )
    spec = llama.common_spec(
        family,
        config,
        llama.windows(config),
        llama.ropes_by_kind(config, 1e6, 1e4),
        feed_forward,
        norm=Norm(config["rms_norm_eps"], rounded=False),
        layer={"norms": "both", "scaled": True},
        model={
            "embedding_scale": config["hidden_size"] ** 0.5,
            "logit_cap": config.get("final_logit_softcapping"),
        },
        qk_norm="head",
        v_norm=True,
        scale=1.0,
    )
    kinds = zip(spec.layers, llama.layer_types(config), strict=True)
    layers = (
        dataclasses.replace(layer, mixer=dataclasses.replace(cast(Heads, layer.mixer), **sizes(config, number, kind)))
        for number, (layer, kind) in enumerate(kinds)
    )
    return dataclasses.replace(spec, layers=tuple(layers))


def sizes(config: dict[str, Any], number: int, kind: str) -> dict[str, Any]:
    """Return the fields of `Heads` that differ between layers.

    transformers writes the sizes into `per_layer_config`, the publisher into `global_head_dim` and
    `num_global_key_value_heads`.
    """
    is_global, shares = kind == "full_attention", config.get("attention_k_eq_v", False)
    by_layer, keys = config.get("per_layer_config"), config.get("num_global_key_value_heads")
    if by_layer is None:
        own = {"head_dim": config.get("global_head_dim", 512)} if is_global else {}
        own |= {"num_key_value_heads": keys} if is_global and shares and keys else {}
    else:
        own = by_layer.get(str(number)) or {}
    if unknown := sorted(own.keys() - PER_LAYER.keys()):
        raise UserError(f"config.json: per_layer_config: {unknown[0]} of layer {number} is not supported")
    return {PER_LAYER[name]: own[name] for name in own} | {"keys_as_values": shares and is_global}
