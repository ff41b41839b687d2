"""Model families by the `model_type` of their config.json; each is one file.

A family is `read_spec`, from config.json, `NAMES`, the Hugging Face tensor of each parameter (of which several may be
parts, in the order of the table), and `IGNORABLE`, a regex of tensors that carry nothing. It may have `MORE_TOKENS`, a
regex of the tensors of a layer that predicts more tokens, which transformers leaves out; a group in it is the layer's
number, which is that after the last.
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
from jaxtune.models.families.entries import Entries
from jaxtune.models.places import Tensor
from jaxtune.models.spec import Experts, ModelSpec

MOST_EXPERTS = 100_000
"""Of all layers together; DeepSeek-V3 has 14,848."""

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

# The class in transformers that each becomes with a head of labels, without "ForSequenceClassification"; of the others
# transformers has none, or none of the decoder alone.
CLASSIFIERS = {
    "deepseek_v3": "DeepseekV3",
    "exaone4": "Exaone4",
    "gemma2": "Gemma2",
    "gemma3_text": "Gemma3Text",
    "glm4": "Glm4",
    "gpt_oss": "GptOss",
    "llama": "Llama",
    "ministral3": "Ministral3",
    "mistral": "Mistral",
    "mixtral": "Mixtral",
    "olmo2": "Olmo2",
    "olmo3": "Olmo3",
    "phi3": "Phi3",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "qwen3_5_text": "Qwen3_5Text",
    "qwen3_moe": "Qwen3Moe",
    "qwen3_next": "Qwen3Next",
    "seed_oss": "SeedOss",
    "smollm3": "SmolLM3",
    "starcoder2": "Starcoder2",
}


def read_spec(config: dict[str, Any]) -> ModelSpec:
    """ModelSpec of a config.json. Raises UserError for a family or a field that is not supported."""
    config = config if isinstance(config, Entries) else Entries(config)
    kind = config.get("model_type")
    if kind not in FAMILIES:
        raise UserError(f"config.json: model_type={kind!r} is not supported; supported: {', '.join(FAMILIES)}")
    try:
        spec = FAMILIES[kind].read_spec(config)
    except KeyError as error:
        raise UserError(f"config.json: {error} is missing; a {kind} model has it") from None
    experts = sum(layer.feed_forward.count for layer in spec.layers if isinstance(layer.feed_forward, Experts))
    if experts > MOST_EXPERTS:  # each of their tensors has a name, which takes longer than anyone waits
        raise UserError(f"config.json: {experts:,} experts in {len(spec.layers):,} layers; at most {MOST_EXPERTS:,}")
    return spec


def names_of(spec: ModelSpec) -> dict[str, str | Tensor]:
    """The family's table of names, with that of a classifier's head where the model has one."""
    names = FAMILIES[spec.family].NAMES
    return names | {"head.weight": "score.weight"} if spec.labels else names


def is_ignorable(spec: ModelSpec, name: str) -> bool:
    """True for a checkpoint's keys that are not read: computed buffers, a head that is not its own, untouched."""
    headless = spec.tied or bool(spec.labels)
    computed = bool(re.search(FAMILIES[spec.family].IGNORABLE, name))
    return computed or (headless and name == "lm_head.weight") or is_untouched(spec, name)


def is_untouched(spec: ModelSpec, name: str) -> bool:
    """True for a checkpoint's keys that are no part of the decoder: they are exported as they are."""
    in_larger_model = spec.untouched is not None and bool(re.search(spec.untouched, name))
    return in_larger_model or predicts_more_tokens(spec, name)


def predicts_more_tokens(spec: ModelSpec, name: str) -> bool:
    """True for a checkpoint's keys of a layer after the decoder, which predicts more than the next token."""
    found = re.search(getattr(FAMILIES[spec.family], "MORE_TOKENS", r"\Z\A."), name)
    return found is not None and (not found.groups() or int(found[1]) == len(spec.layers))
