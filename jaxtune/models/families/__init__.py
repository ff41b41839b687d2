"""Model families by the `model_type` of their config.json; each is one file.

A family has

- `read_spec`, which reads a config.json;
- `NAMES`, the Hugging Face tensor of each parameter; parameters with the same tensor are its parts, in this order;
- `IGNORABLE`, a regex for tensors without information.

It may have

- `CLASSIFIER`, the class in transformers with a head of labels, without "ForSequenceClassification";
- `NO_LORA`, a regex for the linear layers whose LoRA peft cannot load;
- `MORE_TOKENS`, a regex for the tensors of a layer that predicts more tokens, which transformers leaves out. A group in
  it matches the layer's number, which is one after the last layer;
- `EITHER_LAYOUT`, if the matrices of experts are (in, out) in some files and (out, in) in others;
- `MTP`, the `MtpTensors` of the modules that mtp.weight trains;
- `VISION`, the `VisionTensors` of the tower that vision.patches_per_row reads.
"""

import dataclasses
import functools
import importlib
import pkgutil
import re
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from jaxtune.errors import UserError
from jaxtune.models.families.entries import Entries
from jaxtune.models.families.mtp_tensors import MtpTensors, add_modules
from jaxtune.models.families.vision_tensors import VisionTensors
from jaxtune.models.places import Tensor
from jaxtune.models.structure.layer_spec import Experts, Layer
from jaxtune.models.structure.mixers import Heads, Rope
from jaxtune.models.structure.model_spec import ModelSpec

MOST_EXPERTS = 100_000
"""Largest number of experts in all layers together; DeepSeek-V3 has 14,848."""

_MODULES = (importlib.import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__))
FAMILIES: dict[str, ModuleType] = {
    module.__name__.rpartition(".")[2]: module for module in _MODULES if hasattr(module, "NAMES")
}


def classifiers() -> dict[str, str]:
    """Return transformers' classifier of each family that has one, without "ForSequenceClassification"."""
    return {name: family.CLASSIFIER for name, family in FAMILIES.items() if hasattr(family, "CLASSIFIER")}


def read_spec(
    config: dict[str, Any], mtp: bool = False, mtp_default: int | None = None, vision: bool = False
) -> ModelSpec:
    """Return the ModelSpec of a config.json. Raises UserError for a family or a field that is not supported.

    mtp: whether with its multi-token-prediction modules; mtp_default: their number if config.json does not say it.
    vision: whether with its vision tower.
    """
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
    if vision:
        spec = _with_tower(spec, config)
    if not mtp:
        return spec
    trained = [name for name, family in FAMILIES.items() if hasattr(family, "MTP")]
    if kind not in trained:
        raise UserError(
            f"mtp.weight: multi-token-prediction modules of model_type={kind!r} are not trained here; those of "
            f"{', '.join(trained)} are"
        )
    return add_modules(spec, modules_of(spec), config, mtp_default)


def _with_tower(spec: ModelSpec, config: Entries) -> ModelSpec:
    """Return the spec with its vision tower. Raises UserError if the family has none here, or if it does not fit."""
    with_towers = [name for name, family in FAMILIES.items() if hasattr(family, "VISION")]
    if spec.family not in with_towers:
        raise UserError(
            f"vision.patches_per_row, or a prompt with images: model_type={spec.family!r} has no vision tower here; "
            f"{', '.join(with_towers)} have one"
        )
    vision = tower_of(spec).read(config)
    if vision.out != spec.hidden or len(vision.deepstack) > len(spec.layers):
        raise UserError(
            f"config.json: vision_config: the tower has outputs of {vision.out} features, {len(vision.deepstack)} of "
            f"them for the decoder's first layers; the decoder has {spec.hidden} features and {len(spec.layers)} layers"
        )
    mixers = [one for layer in spec.layers for one in layer.mixers if isinstance(one, Heads)]
    for rope, rope_dim in {(one.rope, one.rope_dim) for one in mixers if one.rope is not None and one.rope.axes}:
        _check_axes(rope, int(rope_dim * rope.fraction))
    return dataclasses.replace(spec, vision=vision)


def _check_axes(rope: Rope, rotated: int) -> None:
    """Raise UserError unless the pairs of three axes are all pairs of the rotated features.

    Alternating axes may have others, as in transformers: pairs left over turn with the time.
    """
    if len(rope.axes) != 3 or (not rope.axes_interleaved and 2 * sum(rope.axes) != rotated):
        raise UserError(
            f"config.json: mrope_section={list(rope.axes)}: it must be three numbers, of time, height and width, with "
            f"a sum of {rotated // 2}, half of the {rotated} features of a head that are rotated"
        )


def refuses_lora(spec: ModelSpec, name: str) -> bool:
    """Return whether peft cannot load LoRA of a linear layer."""
    return re.search(getattr(FAMILIES[spec.family], "NO_LORA", r"\Z\A."), name) is not None  # \Z\A. never matches


def modules_of(spec: ModelSpec) -> MtpTensors:
    """Return the tensors of a family's multi-token-prediction modules."""
    return FAMILIES[spec.family].MTP


def tower_of(spec: ModelSpec) -> VisionTensors:
    """Return the tensors of a family's vision tower."""
    return FAMILIES[spec.family].VISION


def names_of(spec: ModelSpec, layer: Layer | None = None) -> Mapping[str, str | Tensor]:
    """Return the family's table of names, with the name of a classifier's head if the model has one.

    layer: one that may be a multi-token-prediction module's or the vision tower's, whose tensors have other names.
    """
    if layer is not None and layer.in_tower:
        return tower_of(spec).layer
    if layer is not None and layer.predictor:
        names = modules_of(spec).names
    else:
        names = FAMILIES[spec.family].NAMES | ({"head.weight": "score.weight"} if spec.labels else {})
        names = names if spec.vision is None else names | tower_of(spec).names(spec.vision)
    names = _stack_experts(names) if spec.stacked_experts else names
    return _swap_experts(names) if spec.swapped_experts else names


def _swap_experts(names: Mapping[str, str | Tensor]) -> Mapping[str, str | Tensor]:
    """Return the table with the matrices of stacked experts in the other of their two layouts."""

    def swap(name: str, tensor: str | Tensor) -> str | Tensor:
        if not isinstance(tensor, Tensor) or not (tensor.stacked and name.startswith("mlp.experts.")):
            return tensor
        return dataclasses.replace(tensor, transposed=not tensor.transposed)

    return {name: swap(name, tensor) for name, tensor in names.items()}


def _stack_experts(names: Mapping[str, str | Tensor]) -> Mapping[str, str | Tensor]:
    """Return the table with a tensor of all experts of a layer in place of one an expert, by transformers' names."""
    gated = any(str(tensor).endswith(".experts.{expert}.gate_proj.weight") for tensor in names.values())

    def stack(tensor: str | Tensor) -> str | Tensor:
        match = re.fullmatch(r"(.*\.experts)\.\{expert\}\.(gate|up|down)_proj\.weight", str(tensor))
        if match is None:
            return tensor
        return Tensor(f"{match[1]}.{'gate_up' if gated and match[2] != 'down' else match[2]}_proj", stacked=True)

    return {name: stack(tensor) for name, tensor in names.items()}


def may_swap_experts(spec: ModelSpec) -> bool:
    """Return whether the matrices of experts have two layouts in files of the family."""
    return hasattr(FAMILIES[spec.family], "EITHER_LAYOUT")


def stacked_experts_of(spec: ModelSpec) -> frozenset[str]:
    """Return the names that tensors of all experts have in files of the other layout, with {layer}; often none."""
    names, stacked = (names_of(dataclasses.replace(spec, stacked_experts=to)) for to in (False, True))
    changed = (tensor for name, tensor in stacked.items() if tensor != names[name])
    return frozenset(tensor.name for tensor in changed if isinstance(tensor, Tensor))


def is_ignorable(spec: ModelSpec, name: str) -> bool:
    """Return whether a checkpoint's key is not read: a computed buffer, a head that is tied or replaced, untouched."""
    headless = spec.tied or bool(spec.labels)
    computed = bool(re.search(FAMILIES[spec.family].IGNORABLE, name))
    ignored = computed or (headless and name == "lm_head.weight") or name in copies_of(spec) or name in _unread(spec)
    return ignored or is_untouched(spec, name)


@functools.cache
def _unread(spec: ModelSpec) -> frozenset[str]:
    """Return the tensors of keys and values in layers that take another layer's; some files have them."""
    takers = [n for n, one in enumerate(spec.layers) if isinstance(one.mixer, Heads) and one.mixer.takes is not None]
    own = [str(hf) for name, hf in names_of(spec).items() if name.startswith(("attention.k", "attention.v"))]
    return frozenset(hf.format(layer=number) for number in takers for hf in own)


def is_untouched(spec: ModelSpec, name: str) -> bool:
    """Return whether a checkpoint's key is outside the decoder; such tensors are exported unchanged."""
    if _is_of_a_module(spec, name) or (spec.vision is not None and re.search(tower_of(spec).tensors, name)):
        return False
    in_larger_model = spec.untouched is not None and bool(re.search(spec.untouched, name))
    return in_larger_model or predicts_more_tokens(spec, name)


def predicts_more_tokens(spec: ModelSpec, name: str) -> bool:
    """Return whether a checkpoint's key is of a layer that predicts more than the next token, and is not computed."""
    if _is_of_a_module(spec, name):
        return False
    match = re.search(getattr(FAMILIES[spec.family], "MORE_TOKENS", r"\Z\A."), name)
    return match is not None and (not match.groups() or int(match[1]) == len(spec.layers))


def _is_of_a_module(spec: ModelSpec, name: str) -> bool:
    """Return whether a checkpoint's key is of a multi-token-prediction module of the spec."""
    match = re.search(modules_of(spec).tensors, name) if spec.mtp else None
    return match is not None and (not match.groups() or len(spec.layers) <= int(match[1]) < spec.tower_start)


def copies_of(spec: ModelSpec) -> dict[str, str]:
    """Return the parameter, such as "embed.weight", of which each of the modules' tensors in the files is a copy."""
    if not spec.mtp:
        return {}
    numbers = range(len(spec.layers), spec.tower_start)
    return {hf.format(layer=n): name for name, hf in modules_of(spec).copies.items() for n in numbers}
