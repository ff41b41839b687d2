"""The sites of a decoder's parameters in Hugging Face's files: by parameter, and the other way round, by tensor."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping
from typing import NamedTuple

from jaxtune.models.declared import Declaration, Kind, declarations
from jaxtune.models.decoder import Decoder
from jaxtune.models.families import names_of
from jaxtune.models.places import Place, Tensor
from jaxtune.models.stack import make_block
from jaxtune.models.structure.layer_spec import Experts, Layer, Treatment
from jaxtune.models.structure.model_spec import ModelSpec, with_every_layer

# Names, inside a layer, of parameters with an axis of experts. A layer has as many experts of images as of texts.
OF_EXPERTS = ("mlp.experts.", "mlp.vision_experts.")


class Site(NamedTuple):
    """A parameter of one layer, or one outside the layers (layer None)."""

    layer: int | None
    local: str
    kind: Kind

    @property
    def of_experts(self) -> bool:
        """Whether it is a parameter of a mixture's experts."""
        return self.local.startswith(OF_EXPERTS)

    def of_module(self, spec: ModelSpec) -> bool:
        """Whether it is a parameter of a multi-token-prediction module."""
        return self.layer is not None and len(spec.layers) <= self.layer < spec.tower_start

    @property
    def of_projector(self) -> bool:
        """Whether it is a parameter of a vision tower's projectors."""
        return self.local.startswith(("vision.projector.", "vision.deepstack."))

    def of_vision(self, spec: ModelSpec) -> bool:
        """Whether it is a parameter of the vision tower or its projectors."""
        return self.local.startswith("vision.") if self.layer is None else self.layer >= spec.tower_start


@functools.cache
def sites(spec: ModelSpec) -> dict[str, tuple[Site, ...]]:
    """Return the parameters in each Hugging Face tensor (several if it is fused), without adapters."""
    by_tensor: dict[str, tuple[Site, ...]] = {}
    # A decoder without layers declares only the parameters outside the layers.
    without = dataclasses.replace(with_every_layer(spec, ()), stages=1, chunks=1)
    outside = declarations(Decoder(without))
    # Equal layers declare the same parameters, so one block is built for each kind of layer.
    inside = {layer: declarations(make_block(spec, layer)) for layer in set(spec.every_layer)}
    every = [(None, None, outside), *((number, layer, inside[layer]) for number, layer in enumerate(spec.every_layer))]
    for number, layer, declared in every:
        for local, tensor in names_of(spec, layer).items():
            if local not in declared:
                continue
            tensor = _tensor(tensor)
            experts = 1 if layer is None or tensor.stacked else math.prod(experts_of(layer, local))
            for expert in range(experts):
                numbers = {"expert": expert, "later_expert": experts + expert}
                name = tensor.name.format(layer=spec.number_in_files(number), **numbers)
                by_tensor[name] = (*by_tensor.get(name, ()), Site(number, local, declared[local].kind))
    return by_tensor


def tensors_of(spec: ModelSpec) -> dict[str, Tensor]:
    """Return the entry of the family's table for each Hugging Face tensor."""
    layers: dict[int | None, Layer | None] = {None: None, **dict(enumerate(spec.every_layer))}
    return {name: _tensor(names_of(spec, layers[site.layer])[site.local]) for name, (site, *_) in sites(spec).items()}


def loaded_names(spec: ModelSpec) -> dict[str, str]:
    """Return transformers' name of each Hugging Face tensor after loading; it differs for some stacked tensors."""
    return {
        name: name
        if tensor.loaded is None
        else tensor.loaded.format(layer=spec.number_in_files(sites(spec)[name][0].layer))
        for name, tensor in tensors_of(spec).items()
    }


def places_of(
    names: Mapping[str, str | Tensor],
    local: str,
    siblings: Mapping[str, Declaration],
    layers: tuple[int | None, ...],
    lead: tuple[int, ...],
    treatment: Treatment,
) -> tuple[Place, ...]:
    """Return a parameter's places in the files. Parameters of a layer with the same tensor name are its rows, in order.

    Adapters have peft's names, such as "q_proj.lora_A.weight". `siblings`: all parameters that the layer declares.
    """
    weight, part = weight_of(local, siblings[local].kind), local.rsplit(".", 1)[-1]
    tensor, experts = _tensor(names[weight]), lead[1] if len(lead) > 1 else 1
    alike = [other for other in names if names[other] == names[weight]]
    parts = [other for other in alike if other in siblings]
    of_stacked = weight != local and tensor.stacked
    of_vectors = tensor.stacked and len(lead) < 2  # some may have no parameter in this model
    if weight != local:
        module = _wrapper(names, tensor, siblings) if of_stacked else _loaded_name(tensor).removesuffix(".weight")
        tensor = Tensor(f"{module}.{treatment.adapter.peft_names[part]}", interleaved=tensor.interleaved)
        parts = parts if part not in treatment.adapter.shared else []
    # The parts' rows are in the order of the family's names: in a fused qkv, k begins after the rows of q. A tensor
    # that is one parameter has one part, and no offset.
    rows = [siblings[other].shape[0] for other in parts]
    first, rows_of_whole, step = 0, None, 1
    if len(parts) > 1:
        number, rows_of_whole = parts.index(weight), sum(rows)
        first, step = (number, len(parts)) if tensor.interleaved else (sum(rows[:number]), 1)

    def place(layer: int | None, expert: int) -> Place:
        name = tensor.name.format(layer=layer, expert=expert, later_expert=experts + expert)
        how = {"transposed": tensor.transposed, "scalar": tensor.scalar}
        whole = Place(name, first, rows_of_whole, step, **how)
        if of_vectors:
            return Place(name, element=alike.index(weight), stack=len(alike))
        if not of_stacked:
            return dataclasses.replace(whole, element=expert, stack=experts) if tensor.stacked else whole
        # peft has one pair of matrices for all experts: A (experts * rank, in), expert after expert; and B
        # (out, rank * experts), in whose columns the expert runs fastest.
        if (axis := siblings[local].axes.index("rank")) == 0:
            rank = siblings[local].shape[axis]
            return dataclasses.replace(whole, first=expert * rank, of=experts * rank)
        return dataclasses.replace(whole, column=expert, columns=experts)

    return tuple(place(layer, expert) for layer, expert in itertools.product(layers or (None,), range(experts)))


def _wrapper(names: Mapping[str, str | Tensor], tensor: Tensor, siblings: Mapping[str, Declaration]) -> str:
    """Return peft's name of the module that a stacked tensor's adapter is in.

    peft wraps the tensor's module once for each adapted tensor in it, the first one innermost, and each wrapper adds
    ".base_layer" to the names inside it.
    """
    adapted = {names[weight_of(local, one.kind)] for local, one in siblings.items() if one.kind == "adapter"}
    module = _loaded_name(tensor).rpartition(".")[0]
    inside = [one for one in map(_tensor, dict.fromkeys(names.values())) if one in adapted and one.stacked]
    outer = [one for one in inside[inside.index(tensor) + 1 :] if _loaded_name(one).rpartition(".")[0] == module]
    return module + ".base_layer" * len(outer)


def weight_of(local: str, kind: Kind) -> str:
    """Return the name of the weight that an adapter's parameter belongs to; for another parameter its own name."""
    return f"{local.rsplit('.', 1)[0]}.weight" if kind == "adapter" else local


def experts_of(layer: Layer, local: str) -> tuple[int, ...]:
    """Return the leading axis of experts of a layer's parameter: (count,), or () if it has none."""
    slot = layer.feed_forward
    return (slot.count,) if isinstance(slot, Experts) and local.startswith(OF_EXPERTS) else ()


def _tensor(entry: str | Tensor) -> Tensor:
    return Tensor(entry) if isinstance(entry, str) else entry


def _loaded_name(tensor: Tensor) -> str:
    return tensor.name if tensor.loaded is None else tensor.loaded
