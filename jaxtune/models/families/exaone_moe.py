"""K-EXAONE: attention of EXAONE 4 with norms before each part; experts of DeepSeek-V3, one shared, and dense layers."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxtune.errors import UserError
from jaxtune.models.families import exaone4, glm4_moe, glm4_moe_lite, llama, mtp_tensors, qwen3, qwen3_moe
from jaxtune.models.families.entries import require
from jaxtune.models.structure.layer_spec import Layer
from jaxtune.models.structure.model_spec import ModelSpec

CORRECTION = {"mlp.router.correction": "model.layers.{layer}.mlp.e_score_correction_bias"}
NAMES = llama.NAMES | qwen3.QK_NORMS | qwen3_moe.MIXTURE | glm4_moe.SHARED | CORRECTION
IGNORABLE, MORE_TOKENS = llama.IGNORABLE, r"^mtp\."


def layer_of_module(last: Layer, config: Mapping[str, Any]) -> Layer:
    """Return the layer of a module: attention as in the last layer, without a window or rope; dense (vLLM)."""
    if (kinds := config.get("mtp_layer_types") or ["full_attention"]) != ["full_attention"]:
        raise UserError(f"config.json: mtp_layer_types={kinds!r}; mtp.weight trains one module with full_attention")
    return dataclasses.replace(last, feed_forward=llama.dense(dict(config)))


MTP = mtp_tensors.apart(NAMES, "num_nextn_predict_layers", layer_of_module)
DEFAULTS = exaone4.DEFAULTS | {
    "moe_intermediate_size": 1024,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "num_shared_experts": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}


def read_spec(config: dict[str, Any]) -> ModelSpec:
    """ModelSpec of an `ExaoneMoeForCausalLM` config.json."""
    config = DEFAULTS | config
    # Entries of published files that transformers does not read.
    require(config, scoring_func="sigmoid", topk_method="noaux_tc", output_router_logits=False)
    shared = {"n_routed_experts": config["num_experts"], "n_shared_experts": config["num_shared_experts"]}
    layers = glm4_moe_lite.feed_forwards(config, glm4_moe.experts(config | shared))
    return exaone4.common_spec("exaone_moe", config, feed_forward=layers)
