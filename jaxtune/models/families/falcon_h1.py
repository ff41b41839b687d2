"""Falcon-H1: attention and Mamba-2 of the same input in every layer, with factors on their inputs and outputs."""

import dataclasses
from typing import Any, cast

from jaxtune.errors import UserError
from jaxtune.models.families import granitemoehybrid, llama, nemotron_h
from jaxtune.models.families.entries import require
from jaxtune.models.structure.layer_spec import FeedForward
from jaxtune.models.structure.mixers import Heads, Hybrid
from jaxtune.models.structure.model_spec import ModelSpec

LAYER = "model.layers.{layer}"
NAMES = (
    {name: hf.replace(".mlp.", ".feed_forward.") for name, hf in llama.NAMES.items()}
    | {"norm.weight": "model.final_layernorm.weight", "mlp_norm.weight": f"{LAYER}.pre_ff_layernorm.weight"}
    | nemotron_h.mamba_names(f"{LAYER}.mamba")
)
IGNORABLE = llama.IGNORABLE
NO_LORA = r"\.mamba\.out_proj$"  # peft refuses it: CUDA kernels read its weight without calling the module
DEFAULTS = {
    "intermediate_size": 14_336,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "mamba_d_ssm": 1024,
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "mamba_norm_before_gate": True,
    "mamba_rms_norm": False,
    "projectors_bias": False,
}


def read_spec(config: dict[str, Any]) -> ModelSpec:
    """ModelSpec of a `FalconH1ForCausalLM` config.json."""
    config = DEFAULTS | config
    normed, bias = bool(config["mamba_rms_norm"]), config["mamba_proj_bias"]
    # The norm before the gate is computed by none of transformers' kernels for training, and no published model has it.
    require(config, projectors_bias=bias, mamba_use_mlp=True, **{"mamba_norm_before_gate": False} if normed else {})
    gate, down = factors(config, "mlp_multipliers", 2)
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    spec = llama.common_spec(
        "falcon_h1",
        config,
        feed_forward=FeedForward(
            config["intermediate_size"], config.get("mlp_bias", False), gate_factor=gate, out_factor=down
        ),
        model={
            "embedding_scale": config.get("embedding_multiplier", 1.0),
            "logit_scale": config.get("lm_head_multiplier", 1.0),
        },
        scale=width**-0.5 * config.get("key_multiplier", 1.0),  # a factor on keys is one on logits
    )
    net = granitemoehybrid.mamba(
        config, config["mamba_d_ssm"], factors=factors(config, "ssm_multipliers", 5), normed=normed
    )

    def outside(mixer: str) -> tuple[float, float]:
        return config.get(f"{mixer}_in_multiplier", 1.0), config.get(f"{mixer}_out_multiplier", 1.0)

    layers = (
        dataclasses.replace(layer, mixer=Hybrid(cast(Heads, layer.mixer), net, outside("attention"), outside("ssm")))
        for layer in spec.layers
    )
    return dataclasses.replace(spec, layers=tuple(layers))


def factors(config: dict[str, Any], name: str, count: int) -> tuple[float, ...]:
    """Return the factors that an entry lists; all 1 without one."""
    values = config.get(name) or [1.0] * count
    if len(values) != count:
        raise UserError(f"config.json: {name} has {len(values)} numbers; it must have {count}")
    return tuple(values)
