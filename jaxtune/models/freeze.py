"""Mark parameters as not trained, by the one selector. Layers that differ in it fall into different stacks."""

import dataclasses

from jaxtune.errors import UserError
from jaxtune.models.families import hf_names
from jaxtune.models.parameters import declare
from jaxtune.models.selection import select
from jaxtune.models.spec import ModelSpec


def freeze(spec: ModelSpec, pattern: str) -> ModelSpec:
    """The spec with the parameters frozen whose Hugging Face name the regex matches. Raises UserError if all do."""
    _, parameters = declare(spec)
    place = {}
    for parameter in parameters.values():
        for name, layer in zip(hf_names(spec.family, parameter), parameter.layers or (None,)):
            place[name] = (layer, parameter.local)
    chosen = select(pattern, place, "train.freeze")
    if len(chosen) == len(place):
        raise UserError(f"train.freeze={pattern!r} matches every parameter: nothing is left to train")
    frozen: dict[int | None, set[str]] = {}
    for name in chosen:
        layer, local = place[name]
        frozen.setdefault(layer, set()).add(local)
    layers = tuple(
        dataclasses.replace(layer, frozen=frozenset(frozen.get(number, ()))) for number, layer in enumerate(spec.layers)
    )
    return dataclasses.replace(spec, layers=layers, frozen=frozenset(frozen.get(None, ())))
