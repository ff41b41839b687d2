"""Mark parameters as not trained, quantized, or by how they are multiplied; and where the mesh would split a block."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Literal

import jax

from jaxtune.config.schema import Precision, Quant
from jaxtune.errors import UserError
from jaxtune.models.families import hf_names, linears, not_linears
from jaxtune.models.parameters import Parameter, declare
from jaxtune.models.selection import select
from jaxtune.models.spec import ModelSpec
from jaxtune.parallel.mesh import misfit
from jaxtune.precision.operands import Numbers
from jaxtune.precision.recipes import numbers_of
from jaxtune.quant import Format


def selected(spec: ModelSpec, options: Quant | Precision, section: str) -> set[str]:
    """Hugging Face names, without ".weight", of the linear layers that the options of a section leave in.

    Raises UserError if there are none.
    """
    place = linears(spec)
    excluded = frozenset()
    if options.exclude is not None:
        excluded = select(options.exclude, place, f"{section}.exclude", not_linears(spec))
    kept = range(options.skip_first_layers, len(spec.layers) - options.skip_last_layers)
    chosen = {name for name, (layer, _) in place.items() if layer in kept and name not in excluded}
    if not chosen:
        raise UserError(
            f"{section} leaves out every linear layer: {section}.skip_first_layers={options.skip_first_layers}, "
            f"{section}.skip_last_layers={options.skip_last_layers} of {len(spec.layers)} layers, "
            f"{section}.exclude={options.exclude!r}; leave some in, or choose "
            f"{'quant.format=None' if section == 'quant' else 'another precision.recipe'}"
        )
    return chosen


def mark_precision(spec: ModelSpec, precision: Precision) -> ModelSpec:
    """The spec with the linear layers in low precision that a low-precision recipe multiplies so.

    For any other recipe, with those in float32 that precision.exclude, skip_first_layers and skip_last_layers name.
    Raises UserError if they name every one.
    """
    chosen = selected(spec, precision, "precision")
    if numbers_of(precision) is None:
        return mark(spec, linears(spec).keys() - chosen, "float32")
    return mark(spec, chosen, "low_precision")


def mark(spec: ModelSpec, names: Iterable[str], field: Literal["quantized", "low_precision", "float32"]) -> ModelSpec:
    """The spec with these linear layers in a field of its layers; those that differ in it are of different stacks."""
    place = linears(spec)
    return spec.with_sites(field, ((layer, f"{site}.weight") for layer, site in (place[name] for name in names)))


def freeze(spec: ModelSpec, pattern: str) -> ModelSpec:
    """The spec with the parameters frozen whose Hugging Face name the regex matches. Raises UserError if all do."""
    place = {
        name: (layer, parameter.local)
        for parameter in declare(spec)[1].values()
        for name, layer in zip(hf_names(spec.family, parameter), parameter.layers or (None,))
    }
    chosen = [place[name] for name in select(pattern, place, "train.freeze")]
    if len(chosen) == len(place):
        raise UserError(f"train.freeze={pattern!r} matches every parameter: nothing is left to train")
    outside = frozenset(local for layer, local in chosen if layer is None)
    return dataclasses.replace(spec.with_sites("frozen", chosen), frozen=outside)


def undivided_blocks(
    parameters: Mapping[str, Parameter], formats: Mapping[str, Format | Numbers], mesh: jax.sharding.Mesh, remedy: str
) -> list[str]:
    """Complaints about blocks that the mesh does not divide, none of which is ever split, and what else would help."""
    complaints = set()
    for name, format in formats.items():
        parameter = parameters[name]
        block = format.block_of(parameter.shape[-2:])
        for axis_name, size, elements in zip(parameter.axes[-2:], parameter.shape[-2:], block):
            blocks, what = size // elements, f"the {size} features of {axis_name} in blocks of {elements}"
            # One block of a stored format can be split, its scale is on every device; that of a product cannot.
            if (blocks > 1 or isinstance(format, Numbers)) and (found := misfit(mesh, axis_name, blocks, what)):
                complaints.add(f"{found} (mesh.data takes the rest); or {remedy}")
    return sorted(complaints)
