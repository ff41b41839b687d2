"""Llama 3.x and what the families that copied its names share: config.json to ModelSpec, and the table of names."""

from collections.abc import Sequence
from typing import Any

from jaxtune.errors import UserError
from jaxtune.models.spec import Experts, Gated, Heads, Layer, ModelSpec, Rope

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
    bias = frozenset("qkvo" if config.get("attention_bias", False) else "")
    return common_spec("llama", config, bias=bias, mlp_bias=config.get("mlp_bias", False))


def common_spec(
    family: str,
    config: dict[str, Any],
    windows: Sequence[int | None] | None = None,
    feed_forwards: Sequence[Gated | Experts] | None = None,
    mlp_bias: bool = False,
    router_loss: float = 0.0,
    **heads: Any,
) -> ModelSpec:
    """The fields that these families share.

    windows and feed_forwards: of each layer; without them no window, and SwiGLU. heads: more fields of `Heads`.
    """
    if config.get("hidden_act", "silu") != "silu":
        raise UserError(f"config.json: hidden_act={config['hidden_act']!r}; {family} here is silu")
    count, rope = config["num_hidden_layers"], read_rope(config)
    queries = config["num_attention_heads"]

    def mixer(window: int | None) -> Heads:
        head_dim = config.get("head_dim") or config["hidden_size"] // queries
        return Heads(queries, config.get("num_key_value_heads") or queries, head_dim, rope, window, **heads)

    dense = Gated(config["intermediate_size"], mlp_bias)
    layers = zip(windows or [None] * count, feed_forwards or [dense] * count)
    return ModelSpec(
        family=family,
        vocabulary=config["vocab_size"],
        hidden=config["hidden_size"],
        layers=tuple(Layer(mixer(window), feed_forward) for window, feed_forward in layers),
        norm_epsilon=config["rms_norm_eps"],
        max_positions=config["max_position_embeddings"],
        tied=config.get("tie_word_embeddings", False),
        initializer_range=config.get("initializer_range", 0.02),
        router_loss=router_loss,
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


def windows(config: dict[str, Any]) -> list[int | None]:
    """The window of each layer, by `layer_types` (or `max_window_layers`, before transformers 4.53)."""
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
    return [window if kind == "sliding_attention" else None for kind in kinds]
