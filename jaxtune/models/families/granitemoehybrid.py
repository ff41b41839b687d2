"""Granite 4: Mamba-2, attention in a few layers, mostly without rope; experts and a shared one, or a feed-forward."""

from typing import Any

from jaxtune.errors import UserError
from jaxtune.models.families import granite, granitemoe, granitemoeshared, llama, nemotron_h
from jaxtune.models.families.entries import check_kinds, require
from jaxtune.models.structure.layer_spec import FeedForward
from jaxtune.models.structure.mixers import Mamba2
from jaxtune.models.structure.model_spec import ModelSpec

MLP = {f"mlp.{name}.weight": granitemoeshared.NAMES[f"mlp.shared.{name}.weight"] for name in ("gate", "up", "down")}
NAMES = granitemoeshared.NAMES | MLP | nemotron_h.mamba_names("model.layers.{layer}.mamba")
IGNORABLE = llama.IGNORABLE
DEFAULTS = {
    "num_local_experts": 8,
    "shared_intermediate_size": 1024,
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
}


def read_spec(config: dict[str, Any]) -> ModelSpec:
    """ModelSpec of a `GraniteMoeHybridForCausalLM` config.json."""
    config = DEFAULTS | config
    rope = llama.read_rope(config) if config.get("position_embedding_type") == "rope" else None
    ropes, size = [rope] * config["num_hidden_layers"], config["shared_intermediate_size"]
    if config["num_local_experts"]:
        spec = granitemoe.common_spec("granitemoehybrid", config, shared=size, rope=ropes)
    else:
        dense = FeedForward(size, activation=llama.activation(config))
        spec = granite.common_spec("granitemoehybrid", config, rope=ropes, feed_forward=dense)
    kinds = layer_types(config)
    net = mamba(config) if "linear_attention" in kinds else None
    return llama.change_layers(spec, kinds, "linear_attention", mixer=net)


def layer_types(config: dict[str, Any]) -> list[str]:
    """Return "full_attention" or "linear_attention" for each layer; older files have other names."""
    count = config["num_hidden_layers"]
    named: list[str] = config.get("layer_types") or config.get("layers_block_type") or ["linear_attention"] * count
    kinds = [nemotron_h.OLDER.get(kind, kind) for kind in named]
    return check_kinds(config, kinds, "full_attention", "linear_attention")


def mamba(config: dict[str, Any], inner: int | None = None, **fields: Any) -> Mamba2:
    """Return the Mamba-2 of a layer; inner: features of all heads; fields: further fields of `Mamba2`."""
    require(config, hidden_act="silu")  # also the activation of its convolution
    heads, groups = config["mamba_n_heads"], config["mamba_n_groups"]
    inner = inner or config["mamba_expand"] * config["hidden_size"]
    head_dim = config.get("mamba_d_head", "auto")
    head_dim = inner // heads if head_dim == "auto" else head_dim
    if heads * head_dim != inner or heads % groups:
        raise UserError(
            f"config.json: mamba_n_heads={heads} does not divide the {inner} features of Mamba-2 into heads of "
            f"mamba_d_head={head_dim}, or is not a multiple of mamba_n_groups={groups}"
        )
    return Mamba2(
        heads=heads,
        head_dim=head_dim,
        groups=groups,
        state=config["mamba_d_state"],
        kernel=config["mamba_d_conv"],
        conv_bias=config["mamba_conv_bias"],
        bias=config["mamba_proj_bias"],
        step_limit=step_limit(config),
        **fields,
    )


def step_limit(config: dict[str, Any]) -> tuple[float, float]:
    """Return the bounds of the step size; transformers writes infinity as an object."""
    limit = config.get("time_step_limit") or (0.0, "Infinity")
    try:
        low, high = (float(one["__float__"] if isinstance(one, dict) else one) for one in limit)
    except (KeyError, TypeError, ValueError):
        raise UserError(f"config.json: time_step_limit={limit!r} is not two numbers") from None
    return low, high
