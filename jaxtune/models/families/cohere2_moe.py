"""Cohere's North Mini: Command R7B with experts, and dense first layers that have rope without a window, too."""

from typing import Any

from jaxtune.models.families import glm4_moe, glm4_moe_lite, llama, qwen3_moe
from jaxtune.models.families.entries import choose, require
from jaxtune.models.structure.layer_spec import Experts, Norm
from jaxtune.models.structure.model_spec import ModelSpec

NAMES, IGNORABLE = llama.NAMES | qwen3_moe.MIXTURE | glm4_moe.SHARED, llama.IGNORABLE
DEFAULTS = {
    "head_dim": 128,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
    "prefix_dense_sliding_window_pattern": 1,
    "first_k_dense_replace": 0,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_shared_experts": 0,
    "expert_selection_fn": "softmax",
    "norm_topk_prob": True,
    "shared_expert_combination_strategy": "average",
    "logit_scale": 0.0625,
    "layer_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}


def read_spec(config: dict[str, Any]) -> ModelSpec:
    """ModelSpec of a `Cohere2MoeForCausalLM` config.json."""
    config = DEFAULTS | config
    # transformers does not read these; of rope's entries it reads rope_parameters and rope_theta.
    require(config, use_parallel_block=True, use_qk_norm=False, rope_scaling=None)
    config = config | {"layer_types": config.get("layer_types") or default_layer_types(config)}
    size = config["intermediate_size"]
    dense = config | {"intermediate_size": config.get("prefix_dense_intermediate_size") or size}
    layers = glm4_moe_lite.feed_forwards(dense, experts(config))
    windows, rope = llama.windows(config), llama.read_rope(config, interleaved=True)
    dense_has_rope = config["prefix_dense_sliding_window_pattern"] == 1
    has_rope = [
        window is not None or (dense_has_rope and not isinstance(layer, Experts))
        for window, layer in zip(windows, layers, strict=True)
    ]
    # If rms_norm_eps is missing or null, which reading it as an entry would refuse, norms are LayerNorms as in cohere2.
    if {**config}.get("rms_norm_eps") is None:
        norm = Norm(config["layer_norm_eps"], centred=True, rounded=False)
    else:
        norm = Norm(config["rms_norm_eps"])
    return llama.common_spec(
        "cohere2_moe",
        config,
        windows,
        [rope if has else None for has in has_rope],
        layers,
        norm=norm,
        layer={"norms": "shared"},
        model={"logit_scale": config["logit_scale"]},
    )


def default_layer_types(config: dict[str, Any]) -> list[str]:
    """Return the kind of each layer's attention: dense first layers have a period of their own."""
    first, count = config["first_k_dense_replace"], config["num_hidden_layers"]

    def kinds(count: int, period: int) -> list[str]:
        return llama.every_nth_is_full({"num_hidden_layers": count}, period)["layer_types"]

    return [
        *kinds(first, config["prefix_dense_sliding_window_pattern"]),
        *kinds(count - first, config["sliding_window_pattern"]),
    ]


def experts(config: dict[str, Any]) -> Experts:
    """Return the experts of a layer, whose output is added to the shared expert's or averaged with it."""
    shared = config["intermediate_size"] * config["num_shared_experts"]
    scores = choose(config, "expert_selection_fn", "softmax", "sigmoid")
    averaged = choose(config, "shared_expert_combination_strategy", "average", "sum") == "average"
    share = 0.5 if shared and averaged else 1.0
    return Experts(
        size=config["intermediate_size"],
        count=config["num_experts"],
        active=config["num_experts_per_tok"],
        normalized=scores == "softmax" or config["norm_topk_prob"],
        activation=llama.activation(config),
        scores=scores,
        scale=share,
        shared=shared,
        shared_scale=share,
    )
