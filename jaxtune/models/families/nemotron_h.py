"""Nemotron-H, Nemotron-3 Nano and Super: Mamba-2, attention without rope, feed-forwards or experts, one a layer."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from jaxtune.errors import UserError
from jaxtune.models.families import llama
from jaxtune.models.families.entries import require
from jaxtune.models.families.mtp_tensors import MtpTensors
from jaxtune.models.structure.layer_spec import Experts, FeedForward, Layer, Norm
from jaxtune.models.structure.mixers import Heads, Mamba2, RandomSteps
from jaxtune.models.structure.model_spec import ModelSpec

# The mixer, the feed-forward or the experts of a layer are all its "mixer".
LAYER, MIXER = "model.layers.{layer}", "model.layers.{layer}.mixer"


def mamba_names(module: str) -> dict[str, str]:
    """Return the names of the parameters of a Mamba-2 in `module`."""
    parts = ("weight", "bias")
    return {
        # The order of the rows in the fused projection.
        **{f"mamba.{name}.{part}": f"{module}.in_proj.{part}" for part in parts for name in ("z", *"xbc", "dt")},
        **{f"mamba.{name}_conv": f"{module}.conv1d.weight" for name in "xbc"},
        **{f"mamba.{name}_conv_bias": f"{module}.conv1d.bias" for name in "xbc"},
        "mamba.log_rate": f"{module}.A_log",
        "mamba.step_bias": f"{module}.dt_bias",
        "mamba.skip": f"{module}.D",
        "mamba.norm": f"{module}.norm.weight",
        **{f"mamba.o.{part}": f"{module}.out_proj.{part}" for part in parts},
    }


FEED_FORWARD = {
    f"mlp.{name}.{part}": f"{MIXER}.{name}_proj.{part}" for name in ("up", "down") for part in ("weight", "bias")
}
MIXTURE = {
    "mlp.router.weight": f"{MIXER}.gate.weight",
    "mlp.router.correction": f"{MIXER}.gate.e_score_correction_bias",
    **{f"mlp.experts.{name}.weight": f"{MIXER}.experts.{{expert}}.{name}_proj.weight" for name in ("up", "down")},
    **{f"mlp.shared.{name}.weight": f"{MIXER}.shared_experts.{name}_proj.weight" for name in ("up", "down")},
    "mlp.latent_down.weight": f"{MIXER}.fc1_latent_proj.weight",
    "mlp.latent_up.weight": f"{MIXER}.fc2_latent_proj.weight",
}
NAMES = {
    "embed.weight": "model.embeddings.weight",
    "norm.weight": "model.norm_f.weight",
    "head.weight": "lm_head.weight",
    "attention_norm.weight": f"{LAYER}.norm.weight",
    "mlp_norm.weight": f"{LAYER}.norm.weight",
    **{f"attention.{name}.weight": f"{MIXER}.{name}_proj.weight" for name in "qkvo"},
    **mamba_names(MIXER),
    **FEED_FORWARD,
    **MIXTURE,
}
IGNORABLE, MORE_TOKENS = llama.IGNORABLE, r"^mtp\."
# peft refuses the output of Mamba, whose weight CUDA kernels read without calling the module; it has no names for the
# experts, which are one tensor in transformers.
NO_LORA = r"\.out_proj$|\.experts\."
KINDS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}  # letters of hybrid_override_pattern
OLDER = {"mamba": "linear_attention", "attention": "full_attention"}
MAMBA_DEFAULTS = {
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "ssm_state_size": 128,
    "conv_kernel": 4,
    "use_conv_bias": True,
    "time_step_min": 0.001,
    "time_step_max": 0.1,
    "time_step_floor": 1e-4,
}
# Older names, which transformers reads too.
OLDER_ENTRIES = {
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_dt_min": "time_step_min",
    "mamba_dt_max": "time_step_max",
    "mamba_dt_init_floor": "time_step_floor",
    "mamba_conv_bias": "use_conv_bias",
}
DEFAULTS = MAMBA_DEFAULTS | {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "mlp_hidden_act": "relu2",
    "layer_norm_epsilon": 1e-5,
    "n_routed_experts": 8,
    "moe_intermediate_size": 7688,
    "moe_shared_expert_intermediate_size": 7688,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
}


def read_spec(config: dict[str, Any]) -> ModelSpec:
    """ModelSpec of a `NemotronHForCausalLM` config.json."""
    config = DEFAULTS | config | {name: config[older] for older, name in OLDER_ENTRIES.items() if older in config}
    # transformers' class has no biases in attention, and neither ties the head nor computes dropout.
    require(config, attention_bias=False, tie_word_embeddings=False, mamba_hidden_act="silu", sliding_window=None)
    heads = config["num_attention_heads"]

    def layer(kind: str) -> Layer:
        match kind:
            case "linear_attention":
                return Layer(mamba(config), None)
            case "full_attention":
                return Layer(Heads(heads, config["num_key_value_heads"] or heads, config["head_dim"], None), None)
            case "moe":
                return Layer(None, experts(config))
            case _:
                return Layer(None, feed_forward(config))

    return ModelSpec(
        family="nemotron_h",
        vocabulary=config["vocab_size"],
        hidden=config["hidden_size"],
        layers=tuple(map(layer, layer_types(config))),
        norm=Norm(config["layer_norm_epsilon"], rounded=False),  # NemotronHRMSNorm rounds after the weight
        max_positions=config["max_position_embeddings"],
        tied=False,
        initializer_range=config.get("initializer_range", 0.02),
    )


def layer_types(config: dict[str, Any]) -> list[str]:
    """Return the kind of each layer, from `layers_block_type` or the letters of `hybrid_override_pattern`."""
    pattern = config.get("hybrid_override_pattern") or ""
    kinds = config.get("layers_block_type") or config.get("layer_types") or [KINDS.get(one, one) for one in pattern]
    kinds = [OLDER.get(kind, kind) for kind in kinds]
    if unknown := sorted(set(kinds) - set(KINDS.values())):
        raise UserError(f"config.json: layers of kind {', '.join(unknown)} are not supported")
    if not kinds:
        raise UserError("config.json: neither layers_block_type nor hybrid_override_pattern names a layer")
    return kinds


def mamba(config: dict[str, Any]) -> Mamba2:
    """Return the Mamba-2 of a layer."""
    heads, groups = config["mamba_num_heads"], config["n_groups"]
    if heads % groups:
        raise UserError(f"config.json: n_groups={groups} does not divide mamba_num_heads={heads}")
    return Mamba2(
        heads=heads,
        head_dim=config["mamba_head_dim"],
        groups=groups,
        state=config["ssm_state_size"],
        kernel=config["conv_kernel"],
        conv_bias=config["use_conv_bias"],
        bias=config.get("use_bias", False),
        # As in transformers, whose class does not read time_step_limit.
        step_limit=(config["time_step_min"], math.inf),
        steps=RandomSteps(config["time_step_min"], config["time_step_max"], config["time_step_floor"]),
    )


def feed_forward(config: dict[str, Any]) -> FeedForward:
    """Return the feed-forward of a layer of kind "mlp"."""
    activation = llama.activation(config, "mlp_hidden_act")
    return FeedForward(config["intermediate_size"], config.get("mlp_bias", False), activation, gated=False)


def experts(config: dict[str, Any]) -> Experts:
    """Return the experts of a layer of kind "moe", chosen as in DeepSeek-V3."""
    if config.get("mlp_bias", False):
        raise UserError("config.json: mlp_bias=true is not supported for a nemotron_h with experts")
    return Experts(
        size=config["moe_intermediate_size"],
        count=config["n_routed_experts"],
        active=config["num_experts_per_tok"],
        normalized=config["norm_topk_prob"],
        activation=llama.activation(config, "mlp_hidden_act"),
        gated=False,
        latent=config.get("moe_latent_size") or 0,
        scores="sigmoid",
        scale=config["routed_scaling_factor"],
        corrected=True,
        groups=config["n_group"],
        active_groups=config["topk_group"],
        float32=True,
        shared=config["moe_shared_expert_intermediate_size"],
    )


def layer_of_module(last: Layer, config: Mapping[str, Any]) -> Layer:
    """Return attention and experts as one layer; a module's files have them as two, each with its norm and residual."""
    kinds = config.get("mtp_layers_block_type") or config.get("mtp_hybrid_override_pattern") or "*E"
    kinds = [OLDER.get(kind, KINDS.get(kind, kind)) for kind in kinds]
    if kinds != ["full_attention", "moe"]:
        raise UserError(f"config.json: mtp.weight trains a module of full_attention and moe, not of {', '.join(kinds)}")
    return dataclasses.replace(last, feed_forward=experts(DEFAULTS | dict(config)))


# As in vLLM's nemotron_h_mtp.py: the first layer begins with the projection, and the second ends with a norm.
ATTENTION_OF_MODULE, EXPERTS_OF_MODULE = "mtp.layers.0", "mtp.layers.1"
MTP = MtpTensors(
    entry="num_nextn_predict_layers",
    names={
        "attention_norm.weight": f"{ATTENTION_OF_MODULE}.norm.weight",
        "mlp_norm.weight": f"{EXPERTS_OF_MODULE}.norm.weight",
        **{name: hf.replace(LAYER, ATTENTION_OF_MODULE) for name, hf in NAMES.items() if name.startswith("attention.")},
        **{name: hf.replace(LAYER, EXPERTS_OF_MODULE) for name, hf in MIXTURE.items()},
        "embedding_norm.weight": f"{ATTENTION_OF_MODULE}.enorm.weight",
        "hidden_norm.weight": f"{ATTENTION_OF_MODULE}.hnorm.weight",
        "projection.weight": f"{ATTENTION_OF_MODULE}.eh_proj.weight",
        "output_norm.weight": f"{EXPERTS_OF_MODULE}.final_layernorm.weight",
    },
    tensors=MORE_TOKENS,
    most=1,
    layer=layer_of_module,
)
