"""How parameters are treated, by their Hugging Face names: what is frozen, quantized, multiplied in low precision."""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

from jaxtune.config.schema import Precision, Quant
from jaxtune.errors import UserError
from jaxtune.models.parameters import Site, sites
from jaxtune.models.selection import select
from jaxtune.models.spec import ModelSpec, treated
from jaxtune.precision.recipes import numbers_of


def treat(spec: ModelSpec, names: Iterable[str], **change: Any) -> ModelSpec:
    """The spec with fields of the `Treatment` of these Hugging Face tensors changed.

    Layers that differ in it are of different stacks. Raises UserError where a parameter would be treated in part.
    """
    known, names = sites(spec), set(names)
    chosen = {site for name in names for site in known[name]}
    for name, found in known.items():
        if name not in names and not chosen.isdisjoint(found):
            one = next(other for other in names if not set(known[other]).isdisjoint(found))
            raise UserError(f"{one} is selected and {name} is not: they are one parameter here; select all of them")
    return treat_sites(spec, chosen, **change)


def treat_sites(spec: ModelSpec, chosen: Iterable[Site], **change: Any) -> ModelSpec:
    """`treat` of parameters that are known by their site."""
    of_layer: dict[int | None, set[str]] = {}
    for site in chosen:
        of_layer.setdefault(site.layer, set()).add(site.local)
    layers = tuple(
        dataclasses.replace(layer, treatments=treated(layer.treatments, of_layer.get(number, ()), change))
        for number, layer in enumerate(spec.layers)
    )
    outside = treated(spec.treatments, of_layer.get(None, ()), change)
    return dataclasses.replace(spec, layers=layers, treatments=outside)


def linears(spec: ModelSpec) -> dict[str, tuple[Site, ...]]:
    """The weights of each linear layer by its Hugging Face name without ".weight"; of a fused one there are several."""
    return {
        name.removesuffix(".weight"): found
        for name, found in sites(spec).items()
        if all(site.kind == "linear" for site in found)
    }


def treat_linears(spec: ModelSpec, names: Iterable[str], **change: Any) -> ModelSpec:
    """`treat` of linear layers by their Hugging Face names, without ".weight"."""
    tensors = {name.removesuffix(".weight"): name for name in sites(spec)}
    return treat(spec, (tensors[name] for name in names), **change)


def not_linears(spec: ModelSpec) -> Iterator[str]:
    """Hugging Face names of everything else, such as the head; those of weights also without ".weight"."""
    known = linears(spec)
    for name in (*sites(spec), "lm_head.weight"):
        if name.removesuffix(".weight") not in known:
            yield from (name.removesuffix(".weight"), name)


def selected(spec: ModelSpec, options: Quant | Precision, section: str) -> set[str]:
    """Hugging Face names, without ".weight", of the linear layers that the options of a section leave in.

    Raises UserError if there are none.
    """
    known = linears(spec)
    excluded = frozenset()
    if options.exclude is not None:
        excluded = select(options.exclude, known, f"{section}.exclude", not_linears(spec))
    kept = range(options.skip_first_layers, len(spec.layers) - options.skip_last_layers)
    chosen = {name for name, (site, *_) in known.items() if site.layer in kept and name not in excluded}
    if not chosen:
        raise UserError(
            f"{section} leaves out every linear layer: {section}.skip_first_layers={options.skip_first_layers}, "
            f"{section}.skip_last_layers={options.skip_last_layers} of {len(spec.layers)} layers, "
            f"{section}.exclude={options.exclude!r}; leave some in, or choose "
            f"{'quant.format=None' if section == 'quant' else 'another precision.recipe'}"
        )
    return chosen


def multiply(spec: ModelSpec, precision: Precision) -> ModelSpec:
    """The spec with the linear layers that a low-precision recipe applies to, multiplied in its format.

    Under any other recipe: with those in float32 that precision.exclude, skip_first_layers and skip_last_layers name.
    Raises UserError if they name every one.
    """
    chosen, numbers = selected(spec, precision, "precision"), numbers_of(precision)
    if numbers is None:
        return treat_linears(spec, linears(spec).keys() - chosen, float32=True)
    return treat_linears(spec, chosen, multiplied=numbers)


def freeze_corrections(spec: ModelSpec) -> ModelSpec:
    """The spec with what is added to routers' scores as it is, however uneven the load."""
    return treat(spec, (name for name, (site, *_) in sites(spec).items() if site.kind == "correction"), trained=False)


def freeze(spec: ModelSpec, pattern: str) -> ModelSpec:
    """The spec with the parameters frozen whose Hugging Face name the regex matches. Raises UserError if all do."""
    known = sites(spec)
    chosen = select(pattern, known, "train.freeze")
    if len(chosen) == len(known):
        raise UserError(f"train.freeze={pattern!r} matches every parameter: nothing is left to train")
    return treat(spec, chosen, trained=False)
