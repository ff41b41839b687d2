"""Model families by the `model_type` of their config.json; each is one file.

A family is `read_spec`, from config.json, `NAMES`, the Hugging Face tensor of each parameter (of which several may be
parts, in the order of the table), and `IGNORABLE`, a regex of tensors that carry nothing.
"""

import re
from types import ModuleType
from typing import Any

from jaxtune.errors import UserError
from jaxtune.models.families import llama, mistral, phi3, qwen2, qwen3, qwen3_moe
from jaxtune.models.spec import ModelSpec

FAMILIES: dict[str, ModuleType] = {
    "llama": llama,
    "mistral": mistral,
    "phi3": phi3,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "qwen3_moe": qwen3_moe,
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
    """True for a checkpoint's keys that carry nothing: computed buffers, and a head that is the embedding."""
    return bool(re.search(FAMILIES[spec.family].IGNORABLE, name)) or (spec.tied and name == "lm_head.weight")
