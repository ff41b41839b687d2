"""OLMo Hybrid: OLMo 3 with gated delta nets, after norms, in three of four layers; attention may have no rope."""

from typing import Any

from jaxtune.errors import UserError
from jaxtune.models.families import llama, olmo2, qwen3_next
from jaxtune.models.families.entries import require
from jaxtune.models.structure.mixers import RandomSteps, Rope
from jaxtune.models.structure.model_spec import ModelSpec

NET = qwen3_next.NET
# Published files have a convolution for each of queries, keys and values. transformers joins them, and writes them in
# three equal parts, which are other shapes if values are wider than keys: such files are refused.
DELTA_NET = (
    {f"delta_net.{name}.weight": f"{NET}.{name}_proj.weight" for name in "qkvbao"}
    | {f"delta_net.{name}_conv": f"{NET}.{name}_conv1d.weight" for name in "qkv"}
    | {
        "delta_net.z.weight": f"{NET}.g_proj.weight",
        "delta_net.log_rate": f"{NET}.A_log",
        "delta_net.step_bias": f"{NET}.dt_bias",
        "delta_net.norm.weight": f"{NET}.o_norm.weight",
    }
)
NAMES, IGNORABLE = olmo2.NAMES | DELTA_NET, olmo2.IGNORABLE
DEFAULTS = {
    "vocab_size": 100_352,
    "max_position_embeddings": 65_536,
    "rms_norm_eps": 1e-6,
    "linear_conv_kernel_dim": 4,
    "linear_allow_neg_eigval": True,
    "linear_a_log_min": 0.0,
    "linear_a_log_max": 16.0,
    "linear_dt_min": 0.001,
    "linear_dt_max": 0.1,
    "linear_dt_init_floor": 1e-4,
}


def read_spec(config: dict[str, Any]) -> ModelSpec:
    """ModelSpec of an `OlmoHybridForCausalLM` config.json."""
    config = DEFAULTS | config
    require(config, hidden_act="silu")  # the activation of the convolutions, too
    require(config, linear_use_gate=True)  # in some files, and not read by transformers
    count, heads = config["num_hidden_layers"], config["num_attention_heads"]
    key_heads = config.get("linear_num_key_heads") or heads
    key_dim = config.get("linear_key_head_dim") or int(0.75 * config["hidden_size"] / key_heads)
    config = config | {
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": config.get("linear_num_value_heads") or heads,
        "linear_key_head_dim": key_dim,
        "linear_value_head_dim": config.get("linear_value_head_dim") or 2 * key_dim,
        # Without layer_types, every fourth layer has attention; of fewer layers, the last one.
        "full_attention_interval": min(4, count),
    }
    net = qwen3_next.delta_net(
        config,
        strength=2.0 if config["linear_allow_neg_eigval"] else 1.0,
        epsilon=1e-5,  # fixed in transformers, as in flash-linear-attention
        rates=(max(config["linear_a_log_min"], 0.01), config["linear_a_log_max"]),  # the logarithm of 0 is infinite
        steps=RandomSteps(config["linear_dt_min"], config["linear_dt_max"], config["linear_dt_init_floor"]),
    )
    spec = olmo2.common_spec("olmo_hybrid", config, rope=[read_rope(config)] * count)
    kinds = qwen3_next.layer_types(config)
    return llama.change_layers(spec, kinds, "linear_attention", mixer=net, norms="before")


def read_rope(config: dict[str, Any]) -> Rope | None:
    """Return the rope; None if rope_theta is null, as published. Without the entry there is a rope."""
    entries = {**config, **(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    if entries.get("rope_theta", 1e4) is not None:
        return llama.read_rope(config)
    if (kind := entries.get("rope_type", "default")) != "default":
        raise UserError(f"config.json: rope_type={kind!r} scales a rope, but there is none: rope_theta is null")
    return None
