"""Gemma 4's text model: wide global layers, norms of values, keys as values, embeddings for each layer, experts."""

import dataclasses
from typing import Any, cast

from jaxtune.errors import UserError
from jaxtune.models.families import gemma3_text, llama
from jaxtune.models.places import Tensor
from jaxtune.models.structure.layer_spec import Experts, FeedForward, Norm
from jaxtune.models.structure.mixers import Heads
from jaxtune.models.structure.model_spec import ModelSpec

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
EMBEDDINGS = {
    "layer_embeddings.weight": "model.embed_tokens_per_layer.weight",
    "layer_embeddings.projection.weight": "model.per_layer_model_projection.weight",
    "layer_embeddings.norm.weight": "model.per_layer_projection_norm.weight",
    "embedding_gate.down.weight": f"{LAYER}.per_layer_input_gate.weight",
    "embedding_gate.up.weight": f"{LAYER}.per_layer_projection.weight",
    "embedding_out_norm.weight": f"{LAYER}.post_per_layer_input_norm.weight",
}
NAMES = gemma3_text.NAMES | MIXTURE | EMBEDDINGS | {"scale": f"{LAYER}.layer_scalar"}
IGNORABLE = llama.IGNORABLE
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
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262_144,
}
PER_LAYER = {"head_dim": "head_dim", "num_key_value_heads": "kv_heads"}
ROPES = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    "sliding_attention": {"rope_theta": 1e4},
}


def read_spec(config: dict[str, Any]) -> ModelSpec:
    """ModelSpec of a `Gemma4ForCausalLM` config.json."""
    config = DEFAULTS | config
    size, rows = config["hidden_size_per_layer_input"], config["vocab_size_per_layer_input"]
    if size and rows != config["vocab_size"]:
        raise UserError(
            f"config.json: vocab_size_per_layer_input={rows} is not supported; it must be vocab_size, "
            f"{config['vocab_size']}"
        )
    return common_spec("gemma4_text", config, layer_embedding=size)


def common_spec(family: str, config: dict[str, Any], **model: Any) -> ModelSpec:
    """Return a ModelSpec with the fields that Gemma 4's text models share; `model`: further ones."""
    config = llama.every_nth_is_full(config, 6)
    config = config | {"layer_types": [*config["layer_types"][:-1], "full_attention"]}  # as transformers does
    config = config | {"rope_parameters": config.get("rope_parameters") or ROPES}
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
        norm=Norm(config["rms_norm_eps"], rounded=False),  # without Gemma 2's offset
        layer={"norms": "both", "scaled": True},
        model={
            "embedding_scale": config["hidden_size"] ** 0.5,
            "logit_cap": config.get("final_logit_softcapping"),
            **model,
        },
        qk_norm="head",
        v_norm=True,
        scale=1.0,  # queries and keys are normalised
    )
    kinds = llama.layer_types(config)
    changes = [sizes(config, *one) | shared for one, shared in zip(enumerate(kinds), sharing(config, kinds))]
    layers = [
        dataclasses.replace(layer, mixer=dataclasses.replace(cast(Heads, layer.mixer), **own))
        for layer, own in zip(spec.layers, changes, strict=True)
    ]
    if config.get("use_double_wide_mlp", False):
        if not isinstance(feed_forward, FeedForward):
            raise UserError("config.json: use_double_wide_mlp=true is not supported with experts (enable_moe_block)")
        wide = dataclasses.replace(feed_forward, size=2 * feed_forward.size)
        layers = [
            dataclasses.replace(layer, feed_forward=wide) if "takes" in own else layer
            for layer, own in zip(layers, changes)
        ]
    return dataclasses.replace(spec, layers=tuple(layers))


def sharing(config: dict[str, Any], kinds: list[str]) -> list[dict[str, str]]:
    """Return the fields of `Heads` of layers that share keys and values, as `kv_sharing_modes` of transformers.

    The last `num_kv_shared_layers` have none: each takes them from the last layer of its kind before all of these.
    """
    count = config.get("num_kv_shared_layers", 0)
    first = max(0, len(kinds) - count)
    own, shared = kinds[:first], kinds[first:]
    if missing := sorted(set(shared) - set(own)):
        raise UserError(
            f"config.json: num_kv_shared_layers={count} leaves no {missing[0]} layer with keys and values of its own"
        )
    last = {kind: number for number, kind in enumerate(own) if kind in shared}  # later numbers replace earlier ones
    return [{"keeps": k} if last.get(k) == n else {} for n, k in enumerate(own)] + [{"takes": k} for k in shared]


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
    causal = is_global and config.get("use_bidirectional_attention") == "vision"
    fields = {"keys_as_values": shares and is_global, "always_causal": causal}
    return {PER_LAYER[name]: own[name] for name in own} | fields
