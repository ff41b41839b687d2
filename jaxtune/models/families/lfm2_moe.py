"""LFM2-MoE: LFM2 with experts chosen by corrected sigmoid scores, after the first dense layers."""

import dataclasses
from typing import Any

from jaxtune.errors import UserError
from jaxtune.models.families import lfm2, qwen3_moe
from jaxtune.models.families.entries import require
from jaxtune.models.structure.layer_spec import FeedForward
from jaxtune.models.structure.model_spec import ModelSpec

MOE = f"{lfm2.LAYER}.feed_forward"
MIXTURE = {
    "mlp.router.weight": f"{MOE}.gate.weight",
    "mlp.router.correction": f"{MOE}.expert_bias",
    **{f"mlp.experts.{name}.weight": f"{MOE}.experts.{{expert}}.{hf}.weight" for name, hf in lfm2.PARTS},
}
NAMES, IGNORABLE = lfm2.NAMES | MIXTURE, lfm2.IGNORABLE
NO_LORA = r"\.feed_forward\.experts\."  # peft does not convert this family's experts to the parameters of its class
DEFAULTS = lfm2.MIXERS | {
    "moe_intermediate_size": 1792,
    "num_dense_layers": 2,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "use_expert_bias": True,
}


def read_spec(config: dict[str, Any]) -> ModelSpec:
    """ModelSpec of an `Lfm2MoeForCausalLM` config.json."""
    config = DEFAULTS | config
    # transformers has no balancing loss for this family.
    require(config, output_router_logits=False)
    if (kinds := config["layer_types"]) is None:
        raise UserError("config.json: layer_types is null; an lfm2_moe model has a kind for each layer there")
    experts = dataclasses.replace(
        qwen3_moe.experts(config),
        scores="sigmoid",
        scale=config["routed_scaling_factor"],
        corrected=bool(config["use_expert_bias"]),
        epsilon=1e-6,  # as in transformers
    )
    dense, first = FeedForward(config["intermediate_size"]), config["num_dense_layers"]
    layers = [dense if number < first else experts for number in range(config["num_hidden_layers"])]
    return lfm2.common_spec("lfm2_moe", config, kinds, layers)
