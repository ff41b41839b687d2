"""Dimensions of parameters, and blocks of their formats, that a mesh does not divide."""

from collections.abc import Mapping

import jax

from jaxtune.models.parameters import Parameter
from jaxtune.models.structure.mixers import DeltaNet, Heads, Mamba2, OneMixer, ShortConv
from jaxtune.models.structure.model_spec import ModelSpec
from jaxtune.parallel.layout import RULES, Axes, axes_in, axes_of, by_head
from jaxtune.parallel.layout import spec as partition_spec
from jaxtune.parallel.mesh import misfit
from jaxtune.precision.operands import MatmulFormat
from jaxtune.quant.format import Format


def find_undivided(spec: ModelSpec, parameters: Mapping[str, Parameter], mesh: jax.sharding.Mesh) -> list[str]:
    """Return complaints about dimensions that the mesh does not divide, each with sizes that would fit."""
    rules, divided = RULES.value, set()
    mixers = {mixer for layer in spec.every_layer for mixer in layer.mixers}
    for stack in (*spec.stacks, *spec.tower_stacks):
        # Layers in a pipeline see a mesh without the axis of stages, and that decides how heads are divided.
        with RULES(rules.apart("stage") if stack.stages > 1 else rules):
            divided |= {("heads", *_mixed_heads(mixer)) for layer in stack.period for mixer in layer.mixers}
    for layout in {rules.parameters, rules.gradients, rules.optimizer}:
        # A head is never split, so the number of heads must be divided, not the number of their features.
        divided |= {(name, size, axes_of(name, layout)) for mixer in mixers for name, size in _heads(mixer)}
        for parameter in parameters.values():
            # Linear weights with heads have them as (heads * features): the check above is the stricter one.
            places = partition_spec(*parameter.axes, layout=layout)
            named = zip(parameter.axes, parameter.shape, map(axes_in, places))
            divided |= {(name, size, axes) for name, size, axes in named if name not in ("heads", "kv_heads")}
    complaints = (misfit(mesh, axes, size, f"{name}={size}") for name, size, axes in sorted(divided, key=str))
    return list(dict.fromkeys(complaint for complaint in complaints if complaint))


def _heads(mixer: OneMixer) -> list[tuple[str, int]]:
    """Return the logical names of a mixer's heads, or of its channels, and their numbers."""
    if isinstance(mixer, ShortConv):
        return [("heads", mixer.channels)]
    if isinstance(mixer, DeltaNet):
        return [("heads", mixer.key_heads), ("heads", mixer.value_heads)]
    if isinstance(mixer, Mamba2):  # groups that devices do not divide are replicated
        return [("heads", mixer.heads)]
    return [("heads", mixer.heads), *[("kv_heads", mixer.kv_heads)] * (not mixer.kv_whole)]


def _mixed_heads(mixer: OneMixer) -> tuple[int, Axes]:
    """Return the number of heads or channels that are mixed independently, and the mesh axes that divide them.

    Key and value heads need not be divided: they are repeated if there are fewer.
    """
    if isinstance(mixer, Heads):
        return mixer.heads, axes_in(by_head(RULES.value.context)[2])
    if isinstance(mixer, ShortConv):
        return mixer.channels, axes_in(by_head()[2])
    return mixer.value_heads if isinstance(mixer, DeltaNet) else mixer.heads, axes_in(by_head()[2])


def undivided_blocks(
    parameters: Mapping[str, Parameter],
    formats: Mapping[str, Format | MatmulFormat],
    mesh: jax.sharding.Mesh,
    remedy: str,
) -> list[str]:
    """Return complaints about parameters with a block that the mesh would split, each with the remedy."""
    complaints = set()
    for name, format in formats.items():
        parameter = parameters[name]
        block = format.block_of(parameter.matrix)
        places = partition_spec(*parameter.axes)[len(parameter.lead) :]
        for axis_name, size, elements, place in zip(parameter.matrix_axes, parameter.matrix, block, places):
            blocks, what = size // elements, f"the {size} features of {axis_name} in blocks of {elements}"
            # A stored matrix of one block can be split, because every device has its scale; a product's block cannot.
            if (blocks > 1 or isinstance(format, MatmulFormat)) and (
                text := misfit(mesh, axes_in(place), blocks, what)
            ):
                complaints.add(f"{text} (mesh.data takes the rest); or {remedy}")
    return sorted(complaints)
