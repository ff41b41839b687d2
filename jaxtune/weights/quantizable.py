"""The weights of a model that an export quantizes, and those that it leaves unquantized."""

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from jaxtune.errors import UserError
from jaxtune.hf.quantized.written import ALL_EXPERTS_FORMATS, EXPERT_FORMATS, fusion_group
from jaxtune.models.families import names_of
from jaxtune.models.parameters import Parameter
from jaxtune.models.places import Place
from jaxtune.models.sites import loaded_names
from jaxtune.models.structure.model_spec import ModelSpec
from jaxtune.quant.format import Format
from jaxtune.quant.format_names import format_of
from jaxtune.quant.options import QuantOptions

_MATRICES = ("linear", "gate", "router", "score")  # kinds that are a Linear in transformers, apart from the head


class Quantizable(NamedTuple):
    """The linear layers of a model in view of a format, by the names of their weights in the files.

    Attributes:
        weights: the weights that are quantized.
        unquantized: other layers, by the names by which readers of config.json may look for them.
        reasons: why a linear layer's weight is not quantized, by its name.
    """

    weights: frozenset[str]
    unquantized: tuple[str, ...]
    reasons: Mapping[str, str]

    @property
    def left_out(self) -> str:
        """The linear layers that are not quantized and why, layers and experts that differ in the number as one."""
        lines = (re.sub(r"\.\d+\b", ".*", f"{name} ({reason})") for name, reason in self.reasons.items())
        return ", ".join(dict.fromkeys(lines))


def quantizable(
    spec: ModelSpec,
    parameters: Mapping[str, Parameter],
    options: QuantOptions,
    asked: str,
    copied: Iterable[str] = (),
) -> Quantizable:
    """Select every linear layer of the decoder that the format can hold.

    Layers that servers fuse into one product are quantized together or not at all.

    Args:
        spec: the model.
        parameters: its parameters; adapters are not looked at.
        options: the format.
        asked: the option by which it was asked for, for errors.
        copied: tensors that are copied from the base unchanged.

    Raises:
        UserError: no layer can be quantized; the decoder is a part of a larger model; transformers could not read the
            experts.
    """
    kind = options.format
    assert kind is not None
    if spec.untouched is not None:
        seeing = "" if spec.vision is None else "; models that are trained on images are exported unquantized"
        raise UserError(
            f"{asked}: {spec.family} has other parts next to the decoder, and a quantized export of such a model is "
            f"not supported{seeing}; leave it out"
        )
    format, reasons = format_of(options, ""), {}
    chosen, unquantized, loaded = set(), dict.fromkeys([_module(_head(spec))]), loaded_names(spec)

    def leave(name: str, reason: str | None) -> None:
        # Readers look up the name in the files, or the module's name in transformers: list both.
        unquantized.update(dict.fromkeys(_module(weight_name) for weight_name in (name, loaded.get(name, name))))
        if reason is not None:
            reasons[name] = reason

    for parameter in parameters.values():
        for place in parameter.places if parameter.kind in _MATRICES else ():
            if any(number >= len(spec.layers) for number in parameter.layers):
                leave(place.name, None)  # multi-token-prediction modules, whose projection vLLM does not quantize
                continue
            reason = _misfit(kind, format, parameter, place) if parameter.kind == "linear" else None
            if reason is None and parameter.kind == "linear":
                chosen.add(place.name)
                continue
            if reason is not None and _is_an_expert(parameter, place) and kind in ALL_EXPERTS_FORMATS:
                raise UserError(
                    f"{asked}: {place.name} cannot be quantized in this format ({reason}), and transformers cannot "
                    "read such files with unquantized experts; choose another format"
                )
            leave(place.name, reason)
    for name in copied:
        leave(name, None)
    partly = {fusion_group(name): name for name in reasons}
    for name in [name for name in sorted(chosen) if fusion_group(name) in partly]:
        chosen.remove(name)
        leave(name, f"servers fuse it with {partly[fusion_group(name)]}")
    selected = Quantizable(frozenset(chosen), tuple(unquantized), reasons)
    if not chosen:
        raise UserError(f"{asked}: no linear layer can be quantized in this format: {selected.left_out}")
    return selected


def _misfit(kind: str, format: Format, parameter: Parameter, place: Place) -> str | None:
    """Why a linear layer's weight cannot be quantized, or None."""
    if place.stack is not None or place.transposed or place.of is not None:
        return "its tensor holds several layers"
    if _is_an_expert(parameter, place) and kind not in EXPERT_FORMATS:
        return f"transformers reads experts only in {', '.join(EXPERT_FORMATS)}"
    if kind == "int8" and parameter.matrix[1] % 4:  # compressed-tensors packs int32 along the input
        return "four weights share a word, and its rows are not a multiple of four"
    return format.misfit(parameter.matrix)


def _is_an_expert(parameter: Parameter, place: Place) -> bool:
    """Whether a weight belongs to one expert and has its own tensor."""
    return len(parameter.lead) > 1 and place.stack is None


def _head(spec: ModelSpec) -> str:
    place = names_of(spec)["head.weight"]
    return place if isinstance(place, str) else place.name


def _module(name: str) -> str:
    """The name of a weight's layer in config.json; for an expert, the module that holds all experts."""
    return fusion_group(name) if ".experts." in name else name.removesuffix(".weight")
