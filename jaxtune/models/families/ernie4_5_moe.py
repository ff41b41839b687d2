"""ERNIE 4.5 with experts: chosen by corrected scores, some shared; by default a dense first layer."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxtune.errors import UserError
from jaxtune.models.families import ernie4_5, glm4_moe, llama, qwen3_moe
from jaxtune.models.families.mtp_tensors import LAYER, MtpTensors
from jaxtune.models.places import Tensor
from jaxtune.models.structure.layer_spec import Experts, Layer
from jaxtune.models.structure.model_spec import ModelSpec

CORRECTION = Tensor("model.layers.{layer}.mlp.moe_statics.e_score_correction_bias", stacked=True)
NAMES = llama.NAMES | qwen3_moe.MIXTURE | glm4_moe.SHARED | {"mlp.router.correction": CORRECTION}
IGNORABLE, MORE_TOKENS = llama.IGNORABLE, "mtp"


def layer_of_module(last: Layer, config: Mapping[str, Any]) -> Layer:
    """Return the layer of a module: a dense one, because experts end with the model's last layer."""
    return dataclasses.replace(last, feed_forward=llama.dense(dict(config)))


# The body's last norm comes before the head, as in the publisher's server (FastDeploy, ernie4_5_mtp.py) and trainer.
MTP = MtpTensors(
    entry="num_nextn_predict_layers",
    names={
        **{name: hf.replace(LAYER, "model.mtp_block.0.") for name, hf in llama.NAMES.items()},
        "embedding_norm.weight": "model.mtp_emb_norm.0.weight",
        "hidden_norm.weight": "model.mtp_hidden_norm.0.weight",
        "projection.weight": "model.mtp_linear_proj.0.weight",
    },
    tensors=r"^model\.mtp_",
    most=1,
    layer=layer_of_module,
)
DEFAULTS = {
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "moe_intermediate_size": 1536,
    "moe_k": 6,
    "moe_num_experts": 64,
    "moe_num_shared_experts": 2,
    "moe_layer_start_index": 1,
    "moe_layer_interval": 1,
}


def experts(config: dict[str, Any], size: int) -> Experts:
    """Return the mixture of a layer; size: hidden features of an expert."""
    return Experts(
        size=size,
        count=config["moe_num_experts"],
        active=config["moe_k"],
        normalized=True,
        activation=llama.activation(config),
        corrected=True,
        float32=True,
        shared=size * config["moe_num_shared_experts"],
    )


def read_spec(config: dict[str, Any]) -> ModelSpec:
    """ModelSpec of an `Ernie4_5_MoeForCausalLM` config.json."""
    config = DEFAULTS | config
    count = config["num_hidden_layers"]
    if config.get("use_bias"):
        raise UserError("config.json: use_bias=true is not supported for this family")
    end = config.get("moe_layer_end_index", -1)
    sparse = range(config["moe_layer_start_index"], count if end == -1 else end + 1)  # -1: to the last layer
    dense = llama.dense(config)
    mixture = experts(config, config["moe_intermediate_size"])
    return llama.common_spec(
        "ernie4_5_moe",
        config,
        rope=ernie4_5.rope(config),
        feed_forward=[
            mixture if n in sparse and (n + 1) % config["moe_layer_interval"] == 0 else dense for n in range(count)
        ],
        model=qwen3_moe.router_loss(config, 0.001),
    )
