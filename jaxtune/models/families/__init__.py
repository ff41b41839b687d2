"""Model families by the `model_type` of their config.json; each is one file.

A family has

- `read_spec`, which reads a config.json;
- `NAMES`, the Hugging Face tensor of each parameter; parameters with the same tensor are its parts, in this order;
- `IGNORABLE`, a regex for tensors without information.

It may have

- `CLASSIFIER`, the class in transformers with a head of labels, without "ForSequenceClassification";
- `MORE_TOKENS`, a regex for the tensors of a layer that predicts more tokens, which transformers leaves out. A group in
  it matches the layer's number, which is one after the last layer.
"""

import importlib
import pkgutil
import re
from types import ModuleType
from typing import Any

from jaxtune.errors import UserError
from jaxtune.models.families.entries import Entries
from jaxtune.models.places import Tensor
from jaxtune.models.spec import Experts, ModelSpec

MOST_EXPERTS = 100_000
"""Largest number of experts in all layers together; DeepSeek-V3 has 14,848."""

_MODULES = (importlib.import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__))
FAMILIES: dict[str, ModuleType] = {
    module.__name__.rpartition(".")[2]: module for module in _MODULES if hasattr(module, "NAMES")
}


def classifiers() -> dict[str, str]:
    """Return transformers' classifier of each family that has one, without "ForSequenceClassification"."""
    return {name: family.CLASSIFIER for name, family in FAMILIES.items() if hasattr(family, "CLASSIFIER")}


def read_spec(config: dict[str, Any]) -> ModelSpec:
    """Return the ModelSpec of a config.json. Raises UserError for a family or a field that is not supported."""
    config = config if isinstance(config, Entries) else Entries(config)
    kind = config.get("model_type")
    if kind not in FAMILIES:
        raise UserError(f"config.json: model_type={kind!r} is not supported; supported: {', '.join(FAMILIES)}")
    try:
        spec = FAMILIES[kind].read_spec(config)
    except KeyError as error:
        raise UserError(f"config.json: {error} is missing; a {kind} model has it") from None
    experts = sum(layer.feed_forward.count for layer in spec.layers if isinstance(layer.feed_forward, Experts))
    if experts > MOST_EXPERTS:  # a name is made for each of their tensors, which would take too long
        raise UserError(f"config.json: {experts:,} experts in {len(spec.layers):,} layers; at most {MOST_EXPERTS:,}")
    return spec


def names_of(spec: ModelSpec) -> dict[str, str | Tensor]:
    """Return the family's table of names, with the name of a classifier's head if the model has one."""
    names = FAMILIES[spec.family].NAMES
    return names | {"head.weight": "score.weight"} if spec.labels else names


def is_ignorable(spec: ModelSpec, name: str) -> bool:
    """Return whether a checkpoint's key is not read: a computed buffer, a head that is tied or replaced, untouched."""
    headless = spec.tied or bool(spec.labels)
    computed = bool(re.search(FAMILIES[spec.family].IGNORABLE, name))
    return computed or (headless and name == "lm_head.weight") or is_untouched(spec, name)


def is_untouched(spec: ModelSpec, name: str) -> bool:
    """Return whether a checkpoint's key is outside the decoder; such tensors are exported unchanged."""
    in_larger_model = spec.untouched is not None and bool(re.search(spec.untouched, name))
    return in_larger_model or predicts_more_tokens(spec, name)


def predicts_more_tokens(spec: ModelSpec, name: str) -> bool:
    """Return whether a checkpoint's key is of a layer after the decoder that predicts more than the next token."""
    match = re.search(getattr(FAMILIES[spec.family], "MORE_TOKENS", r"\Z\A."), name)
    return match is not None and (not match.groups() or int(match[1]) == len(spec.layers))
