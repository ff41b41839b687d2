"""Mark linears as quantized: all but those of the first and last layers, and those that a regex takes out."""

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING

from jaxtune.errors import UserError
from jaxtune.models.families import linears
from jaxtune.models.selection import select
from jaxtune.models.spec import ModelSpec

if TYPE_CHECKING:
    from jaxtune.config.schema import Quant


def selected(spec: ModelSpec, options: "Quant") -> set[str]:
    """Hugging Face names of the linears to quantize, without ".weight". Raises UserError if there are none."""
    place = linears(spec)
    excluded = select(options.exclude, place, "quant.exclude") if options.exclude is not None else frozenset()
    kept = range(options.skip_first_layers, len(spec.layers) - options.skip_last_layers)
    chosen = {name for name, (layer, _) in place.items() if layer in kept and name not in excluded}
    if not chosen:
        raise UserError(
            f"quant.format={options.format!r} is left with no linear to quantize: quant.skip_first_layers="
            f"{options.skip_first_layers}, quant.skip_last_layers={options.skip_last_layers} of {len(spec.layers)} "
            f"layers, quant.exclude={options.exclude!r}"
        )
    return chosen


def mark_quantized(spec: ModelSpec, names: Iterable[str]) -> ModelSpec:
    """The spec with these linears quantized. Layers that differ in it fall into different stacks."""
    place = linears(spec)
    sites: dict[int, set[str]] = {}
    for name in names:
        layer, site = place[name]
        sites.setdefault(layer, set()).add(f"{site}.weight")
    layers = tuple(
        dataclasses.replace(layer, quantized=frozenset(sites.get(number, ())))
        for number, layer in enumerate(spec.layers)
    )
    return dataclasses.replace(spec, layers=layers)
