"""Model families by the `model_type` of their config.json; each is one file.

A family is `read_spec`, from config.json, `NAMES`, the Hugging Face tensor of each parameter (of which several may be
parts, in the order of the table), and `IGNORABLE`, a regex of tensors that carry nothing.
"""

import re
from types import ModuleType
from typing import Any

from jaxtune.errors import UserError
from jaxtune.models.families import (
    cohere2,
    deepseek_v3,
    ernie4_5,
    ernie4_5_moe,
    exaone4,
    gemma2,
    gemma3,
    gemma3_text,
    glm4,
    glm4_moe,
    gpt_oss,
    granite,
    granitemoe,
    llama,
    ministral3,
    mistral,
    mistral3,
    mixtral,
    olmo2,
    olmo3,
    olmoe,
    phi3,
    qwen2,
    qwen3,
    qwen3_5,
    qwen3_5_moe,
    qwen3_5_moe_text,
    qwen3_5_text,
    qwen3_moe,
    qwen3_next,
    seed_oss,
    smollm3,
    starcoder2,
)
from jaxtune.models.spec import ModelSpec

FAMILIES: dict[str, ModuleType] = {
    "cohere2": cohere2,
    "deepseek_v3": deepseek_v3,
    "ernie4_5": ernie4_5,
    "ernie4_5_moe": ernie4_5_moe,
    "exaone4": exaone4,
    "gemma2": gemma2,
    "gemma3": gemma3,
    "gemma3_text": gemma3_text,
    "glm4": glm4,
    "glm4_moe": glm4_moe,
    "gpt_oss": gpt_oss,
    "granite": granite,
    "granitemoe": granitemoe,
    "llama": llama,
    "ministral3": ministral3,
    "mistral": mistral,
    "mistral3": mistral3,
    "mixtral": mixtral,
    "olmo2": olmo2,
    "olmo3": olmo3,
    "olmoe": olmoe,
    "phi3": phi3,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "qwen3_5": qwen3_5,
    "qwen3_5_moe": qwen3_5_moe,
    "qwen3_5_moe_text": qwen3_5_moe_text,
    "qwen3_5_text": qwen3_5_text,
    "qwen3_moe": qwen3_moe,
    "qwen3_next": qwen3_next,
    "seed_oss": seed_oss,
    "smollm3": smollm3,
    "starcoder2": starcoder2,
}


def read_spec(config: dict[str, Any]) -> ModelSpec:
    """ModelSpec of a config.json. Raises UserError for a family or a field that is not supported."""
    kind = config.get("model_type")
    if kind not in FAMILIES:
        raise UserError(f"config.json: model_type={kind!r} is not supported; supported: {', '.join(FAMILIES)}")
    try:
        return FAMILIES[kind].read_spec(config)
    except KeyError as error:
        raise UserError(f"config.json: {error} is missing; a {kind} model has it") from None


def is_ignorable(spec: ModelSpec, name: str) -> bool:
    """True for a checkpoint's keys that are not read: computed buffers, a head that is the embedding, untouched."""
    computed = bool(re.search(FAMILIES[spec.family].IGNORABLE, name))
    return computed or (spec.tied and name == "lm_head.weight") or is_untouched(spec, name)


def is_untouched(spec: ModelSpec, name: str) -> bool:
    """True for a checkpoint's keys that are no part of the decoder: they are exported as they are."""
    return spec.untouched is not None and bool(re.search(spec.untouched, name))
