"""Llama 3.x and what the families that copied its names share: config.json to ModelSpec, and the table of names."""

from typing import Any

from jaxtune.errors import UserError
from jaxtune.models.spec import Layer, ModelSpec, Rope

# Parameter (inside its layer, or whole) <-> Hugging Face name. No tensor is permuted: weights stay (out, in).
NAMES_WITHOUT_BIAS = {
    "embed.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
    "attention_norm.weight": "model.layers.{layer}.input_layernorm.weight",
    "mlp_norm.weight": "model.layers.{layer}.post_attention_layernorm.weight",
    **{f"attention.{name}.weight": f"model.layers.{{layer}}.self_attn.{name}_proj.weight" for name in "qkvo"},
    **{f"mlp.{name}.weight": f"model.layers.{{layer}}.mlp.{name}_proj.weight" for name in ("gate", "up", "down")},
}
BIAS_NAMES = {
    name.replace(".weight", ".bias"): hf.replace(".weight", ".bias")
    for name, hf in NAMES_WITHOUT_BIAS.items()
    if "_proj" in hf
}
NAMES = {**NAMES_WITHOUT_BIAS, **BIAS_NAMES}
IGNORABLE = r"\.rotary_emb\.inv_freq$"  # in old checkpoints, and computed here


def read_spec(config: dict[str, Any]) -> ModelSpec:
    """ModelSpec of a `LlamaForCausalLM` config.json."""
    return common_spec(
        "llama",
        config,
        qkv_bias=config.get("attention_bias", False),
        output_bias=config.get("attention_bias", False),
        mlp_bias=config.get("mlp_bias", False),
    )


def common_spec(family: str, config: dict[str, Any], **fields: Any) -> ModelSpec:
    """The fields that these families share; `fields` adds or replaces."""
    if config.get("hidden_act", "silu") != "silu":
        raise UserError(f"config.json: hidden_act={config['hidden_act']!r}; {family} here is silu")
    return ModelSpec(
        **{
            "family": family,
            "vocabulary": config["vocab_size"],
            "hidden": config["hidden_size"],
            "intermediate": config["intermediate_size"],
            "heads": config["num_attention_heads"],
            "kv_heads": config.get("num_key_value_heads") or config["num_attention_heads"],
            "head_dim": config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
            "layers": (Layer(),) * config["num_hidden_layers"],
            "rope": read_rope(config),
            "norm_epsilon": config["rms_norm_eps"],
            "max_positions": config["max_position_embeddings"],
            "tied": config.get("tie_word_embeddings", False),
            "initializer_range": config.get("initializer_range", 0.02),
            **fields,
        }
    )


def read_rope(config: dict[str, Any]) -> Rope:
    """Rope from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before)."""
    values = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    kind = values.get("rope_type", values.get("type", "default"))
    known = ("default", "linear", "dynamic", "yarn", "llama3")
    if kind not in known:
        raise UserError(f"config.json: rope_type={kind!r} is not supported; supported: {', '.join(known)}")
    if values.get("partial_rotary_factor", 1.0) != 1.0:
        raise UserError("config.json: partial_rotary_factor other than 1 is not supported")
    positions = config["max_position_embeddings"]
    return Rope(
        theta=float(values.get("rope_theta", config.get("rope_theta", 10_000.0))),
        kind=kind,
        factor=float(values.get("factor", 1.0)),
        # dynamic stretches beyond max_position_embeddings itself
        original_positions=positions
        if kind == "dynamic"
        else values.get("original_max_position_embeddings") or positions,
        low_frequency_factor=values.get("low_freq_factor", 1.0),
        high_frequency_factor=values.get("high_freq_factor", 4.0),
        beta_fast=values.get("beta_fast") or 32.0,
        beta_slow=values.get("beta_slow") or 1.0,
        attention_factor=values.get("attention_factor"),
        mscale=values.get("mscale"),
        mscale_all_dim=values.get("mscale_all_dim"),
        truncate=values.get("truncate", True),
    )


def windowed_layers(config: dict[str, Any]) -> tuple[Layer, ...]:
    """Layers whose `layer_types` (or `max_window_layers`, before transformers 4.53) say which have the window."""
    count, window = config["num_hidden_layers"], config.get("sliding_window")
    if not config.get("use_sliding_window", False):
        window = None
    first = config.get("max_window_layers", 28)
    kinds = config.get("layer_types") or [
        "sliding_attention" if window is not None and number >= first else "full_attention" for number in range(count)
    ]
    unknown = sorted(set(kinds) - {"sliding_attention", "full_attention"})
    if unknown or len(kinds) != count:
        raise UserError(f"config.json: layer_types {unknown or len(kinds)} for {count} layers is not supported")
    return tuple(Layer(window=window if kind == "sliding_attention" else None) for kind in kinds)
