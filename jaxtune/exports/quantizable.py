"""The weights of a model that an export quantizes, and those that it leaves unquantized."""

import logging
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from jaxtune.errors import UserError
from jaxtune.hf.quantized.written import ALL_EXPERTS_FORMATS, EXPERT_FORMATS, fusion_group, quantization_config
from jaxtune.models.families import names_of
from jaxtune.models.parameters import Parameter, loaded_names
from jaxtune.models.places import Place
from jaxtune.quant.format import Format
from jaxtune.quant.format_names import format_of
from jaxtune.quant.options import SCHEMES
from jaxtune.weights.model import Model

log = logging.getLogger("jaxtune")

_MATRICES = ("linear", "gate", "router", "score")  # kinds that are a Linear in transformers, apart from the head


class Chosen(NamedTuple):
    """The weights to quantize, by their names in the files, and the quantization entry for config.json."""

    weights: frozenset[str]
    config: Mapping[str, Any]


def choose(model: Model, kind: str, dtype: str, copied: Iterable[str] = ()) -> Chosen:
    """Select every linear layer of the decoder that the format can hold.

    Layers that servers fuse into one product are quantized together or not at all. The log names the layers left out.

    Args:
        model: the model that is exported.
        kind: the format, of SCHEMES.
        dtype: of all other weights.
        copied: tensors that are copied from the base unchanged.

    Raises:
        UserError: no layer can be quantized; the decoder is a part of a larger model; transformers could not read the
            experts.
    """
    if model.spec.untouched is not None:
        raise UserError(
            f"--quantize={kind}: {model.spec.family} has other parts next to the decoder, whose linear layers are not "
            "known here and cannot be listed in config.json; export it without --quantize"
        )
    format, reasons = format_of(SCHEMES[kind], ""), {}
    chosen, unquantized, loaded = set(), dict.fromkeys([_module(_head(model))]), loaded_names(model.base.spec)

    def leave(name: str, reason: str | None) -> None:
        # Readers look up the name in the files, or the module's name in transformers: list both.
        unquantized.update(dict.fromkeys(_module(weight_name) for weight_name in (name, loaded.get(name, name))))
        if reason is not None:
            reasons[name] = reason

    for parameter in model.whole.values():
        for place in parameter.places if parameter.kind in _MATRICES else ():
            if any(number >= len(model.spec.layers) for number in parameter.layers):
                leave(place.name, None)  # multi-token-prediction modules, whose projection vLLM does not quantize
                continue
            reason = _misfit(kind, format, parameter, place) if parameter.kind == "linear" else None
            if reason is None and parameter.kind == "linear":
                chosen.add(place.name)
                continue
            if reason is not None and _is_an_expert(parameter, place) and kind in ALL_EXPERTS_FORMATS:
                raise UserError(
                    f"--quantize={kind}: {place.name} cannot be quantized in this format ({reason}), and transformers "
                    "cannot read such files with unquantized experts; choose another format"
                )
            leave(place.name, reason)
    for name in copied:
        leave(name, None)
    partly = {fusion_group(name): name for name in reasons}
    for name in [name for name in sorted(chosen) if fusion_group(name) in partly]:
        chosen.remove(name)
        leave(name, f"servers fuse it with {partly[fusion_group(name)]}")
    # One line for layers, or experts, whose names differ only in the number.
    listed = dict.fromkeys(re.sub(r"\.\d+\b", ".*", f"{name} ({reason})") for name, reason in reasons.items())
    if not chosen:
        raise UserError(f"--quantize={kind}: no linear layer can be quantized in this format: {', '.join(listed)}")
    log.info("%d linear layers are written in %s; embedding, head and routers stay in %s", len(chosen), kind, dtype)
    if reasons:
        log.warning("%d linear layers stay in %s: %s", len(reasons), dtype, ", ".join(listed))
    return Chosen(frozenset(chosen), quantization_config(kind, dtype, list(unquantized)))


def _misfit(kind: str, format: Format, parameter: Parameter, place: Place) -> str | None:
    """Why a linear layer's weight cannot be quantized, or None."""
    if place.stack is not None or place.transposed or place.of is not None:
        return "its tensor holds several layers"
    if _is_an_expert(parameter, place) and kind not in EXPERT_FORMATS:
        return f"transformers reads experts only in {' and '.join(EXPERT_FORMATS)}"
    return format.misfit(parameter.matrix)


def _is_an_expert(parameter: Parameter, place: Place) -> bool:
    """Whether a weight belongs to one expert and has its own tensor."""
    return len(parameter.lead) > 1 and place.stack is None


def _head(model: Model) -> str:
    place = names_of(model.spec)["head.weight"]
    return place if isinstance(place, str) else place.name


def _module(name: str) -> str:
    """The name of a weight's layer in config.json; for an expert, the module that holds all experts."""
    return fusion_group(name) if ".experts." in name else name.removesuffix(".weight")
