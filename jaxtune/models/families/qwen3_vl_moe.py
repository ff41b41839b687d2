"""Qwen3-VL with experts: their tensors have all experts of a layer, with matrices stored as (in, out).

transformers saves them as (out, in), and reads both.
"""

import dataclasses
from typing import Any

from jaxtune.models.families import llama, qwen3, qwen3_moe, qwen3_vl, vision_wrapper
from jaxtune.models.places import Tensor
from jaxtune.models.structure.model_spec import ModelSpec

EXPERTS = {
    f"mlp.experts.{name}.weight": Tensor(f"{qwen3_moe.MLP}.experts.{hf}_proj", stacked=True, transposed=True)
    for name, hf in (("gate", "gate_up"), ("up", "gate_up"), ("down", "down"))
}
NAMES = vision_wrapper.names(qwen3.NAMES | qwen3_moe.MIXTURE | EXPERTS)
IGNORABLE = qwen3.IGNORABLE
VISION, EITHER_LAYOUT = qwen3_vl.VISION, True
DEFAULTS = {"rms_norm_eps": 1e-6, "max_position_embeddings": 128_000, "num_experts_per_tok": 4}


def read_spec(config: dict[str, Any]) -> ModelSpec:
    """ModelSpec of the decoder of a `Qwen3VLMoeForConditionalGeneration` config.json."""
    decoders = {"qwen3_vl_moe_text": read_text}
    return vision_wrapper.read_spec("qwen3_vl_moe", config, decoders, untouched=qwen3_vl.UNTOUCHED, tied=False)


def read_text(config: dict[str, Any]) -> ModelSpec:
    """ModelSpec of a `Qwen3VLMoeTextModel` config.json."""
    config = DEFAULTS | config
    experts = dataclasses.replace(qwen3_moe.experts(config), normalized=True)
    return llama.common_spec(
        "qwen3_vl_moe",
        config,
        rope=qwen3_vl.three_axes(config, 5e5, [24, 20, 20]),
        feed_forward=qwen3_moe.feed_forwards(config, experts),
        model=qwen3_moe.router_loss(config, 0.001),
        qk_norm="head",
    )
