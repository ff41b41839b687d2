"""Set the treatment of parameters by their Hugging Face names: frozen, quantized, multiplied in low precision."""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

from jaxtune.errors import UserError
from jaxtune.models.selection import select
from jaxtune.models.sites import Site, sites
from jaxtune.models.structure.layer_spec import with_treatment
from jaxtune.models.structure.model_spec import ModelSpec, with_every_layer
from jaxtune.precision.options import PrecisionOptions
from jaxtune.precision.recipes import matmul_format
from jaxtune.quant.options import QuantOptions


def treat(spec: ModelSpec, names: Iterable[str], **change: Any) -> ModelSpec:
    """Return the spec with fields of the `Treatment` changed for the named Hugging Face tensors.

    Layers with different treatments are in different stacks. Raises UserError if only some of the tensors that are one
    parameter here are named.
    """
    known, names = sites(spec), set(names)
    chosen = {site for name in names for site in known[name]}
    for name, its_sites in known.items():
        if name not in names and not chosen.isdisjoint(its_sites):
            one = next(other for other in names if not set(known[other]).isdisjoint(its_sites))
            raise UserError(f"{one} is selected and {name} is not: they are one parameter here; select all of them")
    return treat_sites(spec, chosen, **change)


def treat_sites(spec: ModelSpec, chosen: Iterable[Site], **change: Any) -> ModelSpec:
    """Return the spec with fields of the `Treatment` changed for the given parameters."""
    by_layer: dict[int | None, set[str]] = {}
    for site in chosen:
        by_layer.setdefault(site.layer, set()).add(site.local)
    layers = (
        dataclasses.replace(layer, treatments=with_treatment(layer.treatments, by_layer.get(number, ()), change))
        for number, layer in enumerate(spec.every_layer)
    )
    outside = with_treatment(spec.treatments, by_layer.get(None, ()), change)
    return dataclasses.replace(with_every_layer(spec, layers), treatments=outside)


def linears(spec: ModelSpec) -> dict[str, tuple[Site, ...]]:
    """Return the weights of each linear layer (several if fused), by its Hugging Face name without ".weight"."""
    return {
        name.removesuffix(".weight"): weights
        for name, weights in sites(spec).items()
        if all(site.kind == "linear" for site in weights)
    }


def _decoder_linears(spec: ModelSpec) -> dict[str, tuple[Site, ...]]:
    """Return the `linears` that are not of the vision tower or its projectors."""
    return {name: weights for name, weights in linears(spec).items() if not weights[0].of_vision(spec)}


def treat_linears(spec: ModelSpec, names: Iterable[str], **change: Any) -> ModelSpec:
    """Return the spec with fields of the `Treatment` changed for linear layers, named without ".weight"."""
    tensors = {name.removesuffix(".weight"): name for name in sites(spec)}
    return treat(spec, (tensors[name] for name in names), **change)


def not_linears(spec: ModelSpec) -> Iterator[str]:
    """Yield the Hugging Face names of all other parameters, such as the head and the vision tower's.

    With and without ".weight".
    """
    known = _decoder_linears(spec)
    for name in (*sites(spec), "lm_head.weight"):
        if name.removesuffix(".weight") not in known:
            yield from (name.removesuffix(".weight"), name)


def select_linears(spec: ModelSpec, options: QuantOptions | PrecisionOptions, section: str) -> set[str]:
    """Return the linear layers that a section's options do not exclude, by Hugging Face name without ".weight".

    Those of the vision tower and its projectors are never quantized or multiplied in low precision. Raises UserError if
    there are none.
    """
    known = _decoder_linears(spec)
    excluded = frozenset()
    if options.exclude is not None:
        excluded = select(options.exclude, known, f"{section}.exclude", not_linears(spec))
    layers = {None, *range(options.skip_first_layers, len(spec.layers) - options.skip_last_layers)}
    # Multi-token-prediction modules are numbered after the last layer, and skip_last_layers does not count them.
    layers |= {*range(len(spec.layers), spec.tower_start)}
    chosen = {name for name, (site, *_) in known.items() if site.layer in layers and name not in excluded}
    if not chosen:
        raise UserError(
            f"{section} leaves out every linear layer: {section}.skip_first_layers={options.skip_first_layers}, "
            f"{section}.skip_last_layers={options.skip_last_layers} of {len(spec.layers)} layers, "
            f"{section}.exclude={options.exclude!r}; leave some in, or choose "
            f"{'quant.format=None' if section == 'quant' else 'another precision.recipe'}"
        )
    return chosen


def multiply(spec: ModelSpec, precision: PrecisionOptions) -> ModelSpec:
    """Return the spec with the products of linear layers in the format of a low-precision recipe.

    With any other recipe, the layers that precision.exclude, skip_first_layers and skip_last_layers name are multiplied
    in float32. Raises UserError if they name every layer.
    """
    chosen, numbers = select_linears(spec, precision, "precision"), matmul_format(precision)
    if numbers is None:
        return treat_linears(spec, _decoder_linears(spec).keys() - chosen, float32=True)  # None: no low precision
    return treat_linears(spec, chosen, multiplied=numbers)


def freeze_corrections(spec: ModelSpec) -> ModelSpec:
    """Return the spec with the corrections of routers' scores frozen: the load does not move them."""
    return treat(spec, (name for name, (site, *_) in sites(spec).items() if site.kind == "correction"), trained=False)


def freeze_body(spec: ModelSpec) -> ModelSpec:
    """Return the spec with everything frozen that is not in a multi-token-prediction module."""
    every = {site for of_tensor in sites(spec).values() for site in of_tensor}
    return treat_sites(spec, (site for site in every if not site.of_module(spec)), trained=False)


def freeze_vision(spec: ModelSpec, train: str) -> ModelSpec:
    """Return the spec with the vision tower frozen, but for what vision.train names."""
    every = {site for of_tensor in sites(spec).values() for site in of_tensor}
    trained = {"none": set[Site](), "projector": {site for site in every if site.of_projector}, "tower": every}[train]
    return treat_sites(spec, {site for site in every - trained if site.of_vision(spec)}, trained=False)


def freeze(spec: ModelSpec, pattern: str) -> ModelSpec:
    """Return the spec with the parameters frozen whose names the regex matches. Raises UserError if all match."""
    known = sites(spec)
    chosen = select(pattern, known, "train.freeze")
    if len(chosen) == len(known):
        raise UserError(f"train.freeze={pattern!r} matches every parameter: nothing is left to train")
    return treat(spec, chosen, trained=False)
