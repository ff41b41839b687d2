"""The ModelSpec of a config.json, and a check that the model's family reads the entries that a recipe overrides."""

import difflib
import math
from collections.abc import Iterator, Mapping
from typing import Any

from jaxtune import hf
from jaxtune.config.schema import Config, ModelOptions
from jaxtune.errors import UserError
from jaxtune.models import families
from jaxtune.models.families.entries import Entries
from jaxtune.models.families.llama import ROPE_ENTRIES
from jaxtune.models.parameters import declare
from jaxtune.models.structure.mixers import Heads
from jaxtune.models.structure.model_spec import ModelSpec


def spec_of(described: Mapping[str, Any], saved: Mapping[str, Any], config: Config) -> ModelSpec:
    """Read the spec from `described`, the config.json after model.overrides; `saved` is the one before.

    It has the multi-token-prediction modules with mtp.weight, and the vision tower with vision.patches_per_row. Some
    publishers' config.json have no entry for a module; a model that is trained from scratch must have it, because
    servers read it in the export.

    Raises UserError for an override that is not in `saved` and that the family does not read, and as `read_spec`.
    """
    model, known = config.model, {*_names(saved), *ROPE_ENTRIES}
    default = None if model.from_scratch else 1  # modules, if config.json has no entry for their number
    # This adds to `known` each entry that the family reads.
    vision = config.vision.patches_per_row is not None
    spec = families.read_spec(Entries(described, known), config.mtp.weight > 0, default, vision)
    for names, value in hf.parse_overrides(model):
        for name in (*names, *_names(value)):
            if name not in known:
                near = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0)  # cutoff 0: always one
                raise UserError(
                    f"model.overrides: {'.'.join(names)}: config.json has no {name}, and {spec.family} reads none; "
                    f"nearest: {near[0]}"
                )
    mixers = [mixer for layer in spec.layers for mixer in layer.mixers]
    has_rope = any(isinstance(mixer, Heads) and mixer.rope is not None for mixer in mixers)
    for option in ("rope_scaling", "max_positions"):
        if getattr(model, option) is not None and not has_rope:
            raise UserError(f"model.{option}: this {spec.family} has no rotary embeddings to stretch; leave it out")
    return spec


def _names(value: Any) -> Iterator[str]:
    """Yield the names of all entries of an object and of the objects nested in it."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield name
            yield from _names(inner)


def count_parameters(model: ModelOptions) -> int:
    """The number of parameters of a model, by its config.json, which is downloaded if need be."""
    declared = declare(families.read_spec(hf.read_described_config(model)))[1]
    return sum(math.prod(parameter.shape) for parameter in declared.values())
