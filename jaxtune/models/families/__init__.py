"""Model families by the `model_type` of their config.json; each is one file.

A family is `read_spec`, from config.json, `NAMES`, the Hugging Face tensor of each parameter (of which several may be
parts, in the order of the table), and `IGNORABLE`, a regex of tensors that carry nothing. It may have

- `CLASSIFIER`, the class in transformers that it becomes with a head of labels, without "ForSequenceClassification";
- `MORE_TOKENS`, a regex of the tensors of a layer that predicts more tokens, which transformers leaves out; a group in
  it is the layer's number, which is that after the last.
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
"""Of all layers together; DeepSeek-V3 has 14,848."""

_MODULES = (importlib.import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__))
FAMILIES: dict[str, ModuleType] = {
    module.__name__.rpartition(".")[2]: module for module in _MODULES if hasattr(module, "NAMES")
}


def classifiers() -> dict[str, str]:
    """The class in transformers, without "ForSequenceClassification", of each family that has one with labels."""
    return {name: family.CLASSIFIER for name, family in FAMILIES.items() if hasattr(family, "CLASSIFIER")}


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
