"""Model families by the `model_type` of their config.json; each is one file."""

import re
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from jaxtune.errors import UserError
from jaxtune.models.families import llama, mistral, qwen2, qwen3
from jaxtune.models.parameters import Parameter, declare
from jaxtune.models.spec import ModelSpec

FAMILIES: dict[str, ModuleType] = {"llama": llama, "mistral": mistral, "qwen2": qwen2, "qwen3": qwen3}
ADAPTER_NAMES = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight"}


def read_spec(config: dict[str, Any]) -> ModelSpec:
    """ModelSpec of a config.json. Raises UserError for a family or a field that is not supported."""
    kind = config.get("model_type")
    if kind not in FAMILIES:
        raise UserError(f"config.json: model_type={kind!r} is not supported; supported: {', '.join(FAMILIES)}")
    try:
        return FAMILIES[kind].read_spec(config)
    except KeyError as error:
        raise UserError(f"config.json: {error} is missing; a {kind} model has it") from None


def hf_names(family: str, parameter: Parameter) -> tuple[str, ...]:
    """Hugging Face names of a parameter: one a stacked layer, or the one. Adapters get peft's: q_proj.lora_A.weight."""
    module, leaf = parameter.local.rsplit(".", 1)
    if parameter.is_adapter:
        pattern = FAMILIES[family].NAMES[f"{module}.weight"].removesuffix("weight") + ADAPTER_NAMES[leaf]
    else:
        pattern = FAMILIES[family].NAMES[parameter.local]
    return tuple(pattern.format(layer=layer) for layer in parameter.layers) or (pattern,)


def linears(spec: ModelSpec) -> dict[str, tuple[int, str]]:
    """Layer and site ("mlp.down") of every linear of the layers, by its Hugging Face name without ".weight"."""
    return {
        name.removesuffix(".weight"): (layer, parameter.local.removesuffix(".weight"))
        for parameter in declare(spec)[1].values()
        if len(parameter.shape) == 3 and not parameter.is_adapter  # a stacked matrix is a linear
        for name, layer in zip(hf_names(spec.family, parameter), parameter.layers)
    }


def not_linears(spec: ModelSpec) -> Iterator[str]:
    """Hugging Face names of everything else, such as the head; those of weights also without ".weight"."""
    place = linears(spec)
    for pattern in FAMILIES[spec.family].NAMES.values():
        for layer in range(len(spec.layers)):
            name = pattern.format(layer=layer)
            if name.removesuffix(".weight") not in place:
                yield from (name.removesuffix(".weight"), name)


def is_ignorable(spec: ModelSpec, name: str) -> bool:
    """True for a checkpoint's keys that carry nothing: computed buffers, and a head that is the embedding."""
    return bool(re.search(FAMILIES[spec.family].IGNORABLE, name)) or (spec.tied and name == "lm_head.weight")
