"""Llama 3.x, and code that families with its tensor names share: config.json to ModelSpec, and the table of names."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jaxtune.errors import UserError
from jaxtune.models.families.entries import Entries, check_kinds
from jaxtune.models.structure.layer_spec import Activation, Experts, FeedForward, Layer, Norm
from jaxtune.models.structure.mixers import Heads, Rope
from jaxtune.models.structure.model_spec import ModelSpec

CLASSIFIER = "Llama"

# Parameter (its name inside the layer, or the whole name) -> Hugging Face name. No tensor is permuted: weights stay
# (out, in).
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
IGNORABLE = r"\.rotary_emb\.inv_freq$"  # stored in old checkpoints, but computed here


def read_spec(config: dict[str, Any]) -> ModelSpec:
    """ModelSpec of a `LlamaForCausalLM` config.json."""
    return common_spec("llama", config, mlp_bias=config.get("mlp_bias", False))


def common_spec(
    family: str,
    config: dict[str, Any],
    window: int | Sequence[int | None] | None = None,
    rope: Rope | Sequence[Rope | None] | None = None,
    feed_forward: FeedForward | Experts | Sequence[FeedForward | Experts] | None = None,
    mlp_bias: bool = False,
    norm: Norm | None = None,
    layer: Mapping[str, Any] = {},
    model: Mapping[str, Any] = {},
    **heads: Any,
) -> ModelSpec:
    """Return a ModelSpec with the fields that these families share.

    Args:
        family: `ModelSpec.family`.
        config: the entries of config.json.
        window: window of all layers, or a list with an entry for each layer; default: none.
        rope: rope of all layers, or a list; default: from `read_rope`.
        feed_forward: feed-forward of all layers, or a list; default: a gated layer with the config's activation.
        mlp_bias: whether that default layer has biases.
        norm: the norms; default: an RMSNorm with rms_norm_eps.
        layer, model, heads: further fields of `Layer`, `ModelSpec` and `Heads`. `bias` of `Heads` follows
            `attention_bias` by default.
    """
    count, queries = config["num_hidden_layers"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // queries
    heads = {"bias": frozenset("qkvo" if config.get("attention_bias", False) else "")} | heads

    def each(value: Any) -> Sequence[Any]:
        return value if isinstance(value, Sequence) else [value] * count

    def mixer(window: int | None, rope: Rope | None) -> Heads:
        return Heads(queries, config.get("num_key_value_heads") or queries, head_dim, rope, window, **heads)

    ropes = each(rope or read_rope(config))
    # max_position_embeddings is the length before a dynamic scaling, but the length after any other scaling.
    stretch = max((one.factor for one in ropes if one is not None and one.kind == "dynamic"), default=1.0)
    mixers = map(mixer, each(window), ropes)
    slots = zip(mixers, each(feed_forward or dense(config, mlp_bias)), strict=True)
    return ModelSpec(
        family=family,
        vocabulary=config["vocab_size"],
        hidden=config["hidden_size"],
        layers=tuple(Layer(*slot, **layer) for slot in slots),
        norm=norm or Norm(config["rms_norm_eps"]),
        max_positions=int(config["max_position_embeddings"] * stretch),
        tied=config.get("tie_word_embeddings", False),
        initializer_range=config.get("initializer_range", 0.02),
        **model,
    )


def change_layers(spec: ModelSpec, kinds: Sequence[str], kind: str, **fields: Any) -> ModelSpec:
    """Return the spec with other fields, such as the mixer, in its layers of a kind; `kinds`: of each layer."""
    layers = (
        dataclasses.replace(layer, **fields) if of_layer == kind else layer
        for layer, of_layer in zip(spec.layers, kinds, strict=True)
    )
    return dataclasses.replace(spec, layers=tuple(layers))


def dense(config: dict[str, Any], bias: bool = False) -> FeedForward:
    """Return the gated feed-forward layer of a config."""
    return FeedForward(config["intermediate_size"], bias, activation(config))


ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu2": "relu2",
}


def activation(config: dict[str, Any], key: str = "hidden_act") -> Activation:
    """Return the activation of feed-forward layers that the config names; default: silu."""
    name = config.get(key, "silu")
    if name not in ACTIVATIONS:
        raise UserError(f"config.json: {key}={name!r} is not supported; supported: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def read_rope(config: dict[str, Any], theta: float = 10_000.0, **fields: Any) -> Rope:
    """Read the rope from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before 5).

    theta: default of rope_theta. fields: further fields of `Rope`.
    """
    values = rope_entries(config)
    kind = values.get("rope_type", values.get("type", "default"))
    known = ("default", "linear", "dynamic", "yarn", "llama3", "proportional")
    if kind not in known:
        raise UserError(f"config.json: rope_type={kind!r} is not supported; supported: {', '.join(known)}")
    if kind == "proportional":
        fields["fraction"] = values.get("partial_rotary_factor", 1.0)
    elif partial_rotary(config) != fields.get("fraction", 1.0):
        raise UserError(f"config.json: partial_rotary_factor={partial_rotary(config)} is not supported for this family")
    positions = config["max_position_embeddings"]
    return Rope(
        theta=float(values.get("rope_theta", config.get("rope_theta", theta))),
        kind=kind,
        factor=float(values.get("factor", 1.0)),
        # dynamic scaling stretches from max_position_embeddings
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
        **fields,
    )


# Names of the entries in a rope's object (rope_parameters, rope_scaling).
ROPE_ENTRIES = frozenset(
    (
        *("rope_theta", "rope_type", "type", "factor", "original_max_position_embeddings", "partial_rotary_factor"),
        *("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor", "mscale"),
        *("mscale_all_dim", "truncate"),
    )
)


def rope_entries(config: dict[str, Any]) -> Entries:
    """Return the entries of `rope_parameters` and `rope_scaling`."""
    return Entries({**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})})


def partial_rotary(config: dict[str, Any]) -> float:
    """Return the fraction of a head's features that are rotated."""
    nested = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return nested.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))


def ropes_by_kind(config: dict[str, Any], theta: float, local_theta: float) -> list[Rope]:
    """Return the rope of each layer, for families whose layers with a window have their own rope."""
    nested = config.get("rope_parameters") or {}
    if "full_attention" not in nested:  # before transformers 5
        nested = {"full_attention": config.get("rope_scaling") or {}}
    base = Entries({key: value for key, value in config.items() if key not in ("rope_scaling", "rope_theta")})

    def rope(kind: str, key: str, theta: float) -> Rope:
        values = {"rope_theta": config.get(key, theta)} | (nested.get(kind) or {})
        return read_rope(base | {"rope_parameters": values})

    by_kind = {
        "full_attention": rope("full_attention", "rope_theta", theta),
        "sliding_attention": rope("sliding_attention", "rope_local_base_freq", local_theta),
    }
    return [by_kind[kind] for kind in layer_types(config)]


def layer_types(config: dict[str, Any]) -> list[str]:
    """Return "full_attention" or "sliding_attention" for each layer, from `layer_types`."""
    return check_kinds(config, config["layer_types"], "full_attention", "sliding_attention")


def every_nth_is_full(config: dict[str, Any], period: int | str) -> dict[str, Any]:
    """Return the config with `layer_types`; by default all layers have a window, except the last of each period.

    period: its number of layers, or a string with a letter for each, L (local) or G (global). With a string, the last
    layer of the model is also global.
    """
    count = config["num_hidden_layers"]
    if isinstance(period, str):
        full = [period[n % len(period)] == "G" or n == count - 1 for n in range(count)]
    else:
        full = [(n + 1) % period == 0 for n in range(count)]
    kinds = ["full_attention" if is_full else "sliding_attention" for is_full in full]
    return config | {"layer_types": config.get("layer_types") or kinds}


def windows(config: dict[str, Any]) -> list[int | None]:
    """Return the window of each layer, from `layer_types`."""
    window = config.get("sliding_window")
    return [window if kind == "sliding_attention" else None for kind in layer_types(config)]


def optional_windows(config: dict[str, Any]) -> list[int | None]:
    """Return the window of each layer if `use_sliding_window` is true, else None for each.

    Without `layer_types` (before transformers 4.53), layers from `max_window_layers` on have a window.
    """
    count, first = config["num_hidden_layers"], config.get("max_window_layers", 28)
    if not config.get("use_sliding_window", False):
        config = config | {"sliding_window": None}
    kinds = ["sliding_attention" if number >= first else "full_attention" for number in range(count)]
    return windows(config | {"layer_types": config.get("layer_types") or kinds})
