"""Which weights of a model are quantized when it is exported, and which stay as they are."""

import logging
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from jaxtune.config.schemes import SCHEMES
from jaxtune.errors import UserError
from jaxtune.hf.quantized.written import OF_EXPERTS, WITH_EXPERTS, quantization_config, together
from jaxtune.models.families import names_of
from jaxtune.models.parameters import Parameter, loaded_names
from jaxtune.models.places import Place
from jaxtune.quant import Format, format_of
from jaxtune.weights.model import Model

log = logging.getLogger("jaxtune")

_MATRICES = ("linear", "gate", "router", "score")  # what transformers has a Linear for, besides the head


class Chosen(NamedTuple):
    """The weights that are quantized, by their names in the files, and config.json's entry about them."""

    weights: frozenset[str]
    config: Mapping[str, Any]


def choose(model: Model, kind: str, dtype: str, copied: Iterable[str] = ()) -> Chosen:
    """Of a model that is written in `dtype`, every linear layer of the decoder that the format can hold.

    `copied`: tensors that are written as they are in the base.
    Layers that servers multiply as one are quantized together or not at all. The log names what is left out.

    Raises:
        UserError: there is none; the decoder is a part of a larger model; transformers could not read its experts.
    """
    if model.spec.untouched is not None:
        raise UserError(
            f"--quantize={kind}: {model.spec.family} is more than a decoder, and which linear layers its other parts "
            "have is not known here, so that config.json could not name them; export it without --quantize"
        )
    format, reasons = format_of(SCHEMES[kind], ""), {}
    chosen, others, loaded = set(), dict.fromkeys([_module(_head(model))]), loaded_names(model.base.spec)

    def leave(name: str, reason: str | None) -> None:
        # Readers look for it by the name in the files, or by that of the module that transformers makes of it.
        others.update(dict.fromkeys(_module(found) for found in (name, loaded.get(name, name))))
        if reason is not None:
            reasons[name] = reason

    for parameter in model.whole.values():
        for place in parameter.places if parameter.kind in _MATRICES else ():
            reason = _misfit(kind, format, parameter, place) if parameter.kind == "linear" else None
            if reason is None and parameter.kind == "linear":
                chosen.add(place.name)
                continue
            if reason is not None and _is_an_expert(parameter, place) and kind in WITH_EXPERTS:
                raise UserError(
                    f"--quantize={kind}: {place.name} cannot be quantized so ({reason}), and transformers reads no "
                    "such files with experts that are not; choose another format"
                )
            leave(place.name, reason)
    for name in copied:
        leave(name, None)
    partly = {together(name): name for name in reasons}
    for name in [name for name in sorted(chosen) if together(name) in partly]:
        chosen.remove(name)
        leave(name, f"it goes together with {partly[together(name)]}")
    # Of layers, and experts, that differ in their number alone, one line.
    listed = dict.fromkeys(re.sub(r"\.\d+\b", ".*", f"{name} ({reason})") for name, reason in reasons.items())
    if not chosen:
        raise UserError(f"--quantize={kind}: no linear layer can be quantized so: {', '.join(listed)}")
    log.info("%d linear layers are written in %s; embedding, head and routers stay in %s", len(chosen), kind, dtype)
    if reasons:
        log.warning("%d linear layers stay in %s: %s", len(reasons), dtype, ", ".join(listed))
    return Chosen(frozenset(chosen), quantization_config(kind, dtype, list(others)))


def _misfit(kind: str, format: Format, parameter: Parameter, place: Place) -> str | None:
    """Why a linear layer's weight cannot be quantized, or None."""
    if place.stack is not None or place.transposed or place.of is not None:
        return "its tensor holds several layers"
    if _is_an_expert(parameter, place) and kind not in OF_EXPERTS:
        return f"transformers reads experts in {' and '.join(OF_EXPERTS)} alone"
    return format.misfit(parameter.matrix)


def _is_an_expert(parameter: Parameter, place: Place) -> bool:
    """Whether a weight is that of one expert, in a tensor of its own."""
    return len(parameter.lead) > 1 and place.stack is None


def _head(model: Model) -> str:
    found = names_of(model.spec)["head.weight"]
    return found if isinstance(found, str) else found.name


def _module(name: str) -> str:
    """What config.json calls the layer of a weight: of experts, what holds them all."""
    return together(name) if ".experts." in name else name.removesuffix(".weight")
