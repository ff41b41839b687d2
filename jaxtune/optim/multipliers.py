"""Factors of the learning rate and the weight decay, for each parameter and each of its layers."""

import re
from collections.abc import Callable, Mapping

import numpy as np
from jaxtyping import Float

from jaxtune.errors import UserError
from jaxtune.models.selection import select
from jaxtune.optim.options import OptimOptions

EMBEDDING = r"embed_tokens|\bembeddings\.weight"  # the second is Nemotron-H's
# The vision tower and its projectors.
TOWER = r"\b(visual|vision_tower|multi_modal_projector|embed_vision|vision_model|resampler_model)\."
# Norms and positions of vision towers, the last norms in ERNIE's resampler.
_OF_TOWERS = r"\bln_(q|pre)\b|\.ln\.|\b(pos_embed|position_embedding(_table)?)\b|\b(spatial|temporal)_linear\.3\b"
# A_log, D: recurrences; sinks: gpt-oss; factors of the router's input and of its experts: Gemma 4.
NO_DECAY = rf"norm|bias|A_log|\.D$|sinks|\brouter\.(per_expert_)?scale$|{_OF_TOWERS}|{EMBEDDING}"

# One number, or one for each layer of a stacked parameter.
Factor = float | Float[np.ndarray, " layers"]


def rates(optim: OptimOptions, hf_names: Mapping[str, tuple[str, ...]], layers: int) -> dict[str, Factor]:
    """Return each trained parameter's factor on the learning rate: optim.lr_multipliers times its layer's factor.

    hf_names: Hugging Face names of each parameter, one for each stacked layer. layers: number of layers of the model.

    optim.layerwise_lr_decay is ELECTRA's (Clark et al. 2020), in BEiT's form: layer n of L, counted from 0, gets
    decay^(L - n), the embedding (also a tied one) and the vision tower decay^(L + 1), the final norm, the head and
    modules after it 1. optim.layerwise_lr_decay_bound is ERNIEKit's: layer n gets bound + (1 - bound) n / (L + 2), the
    embedding and the vision tower the bound (as does layer 0), the final norm, the head and modules after it 1.

    Raises UserError for a regex that matches nothing.
    """
    factors = _factors(optim.lr_multipliers, _all(hf_names), "optim.lr_multipliers")
    bound = optim.layerwise_lr_decay_bound

    def rate(name: str) -> float:
        depth = _depth(name, layers)
        height = max(0, layers - depth) / (layers + 2) if depth else 1.0
        return factors.get(name, 1.0) * optim.layerwise_lr_decay**depth * (bound + (1.0 - bound) * height)

    return _by_parameter(hf_names, rate)


def decays(optim: OptimOptions, hf_names: Mapping[str, tuple[str, ...]]) -> dict[str, Factor]:
    """Return each trained parameter's weight decay: optim.weight_decay times optim.decay_multipliers, or 0.

    It is 0 for parameters that optim.no_decay matches. hf_names: as in `rates`. Raises UserError for a regex that
    matches nothing, or a multiplier that matches only parameters without decay.
    """
    names = _all(hf_names)
    if optim.no_decay is None:
        without = frozenset(name for name in names if re.search(NO_DECAY, name))
    elif not optim.no_decay:
        without = frozenset()
    else:
        without = select(optim.no_decay, names, "optim.no_decay")
        if without >= set(names):
            raise UserError(
                f"optim.no_decay={optim.no_decay!r} matches every trained parameter, so that none has "
                f"optim.weight_decay={optim.weight_decay}; set optim.weight_decay=0, or a pattern that matches some"
            )
    factors = _factors(optim.decay_multipliers, names, "optim.decay_multipliers", without)
    factors |= dict.fromkeys(without, 0.0)
    return _by_parameter(hf_names, lambda name: optim.weight_decay * factors.get(name, 1.0))


def _all(hf_names: Mapping[str, tuple[str, ...]]) -> list[str]:
    return [name for names in hf_names.values() for name in names]


def _factors(
    entries: tuple[str, ...], names: list[str], option: str, without: frozenset[str] = frozenset()
) -> dict[str, float]:
    """Return the factor of each name that an entry 'REGEX=FACTOR' matches; the last matching entry wins."""
    factors = {}
    for entry in entries:
        pattern, _, factor = entry.rpartition("=")
        chosen = select(pattern, names, option)
        if chosen <= without:
            raise UserError(f"{option}={entry!r} matches only parameters without decay, by optim.no_decay")
        factors |= dict.fromkeys(chosen, float(factor))
    return factors


def _depth(name: str, layers: int) -> int:
    """Return the distance of a parameter from the head: 0 for the head and for modules after it, 1 for the last layer.

    The vision tower has the distance of the embedding. Layers of multi-token-prediction modules are numbered on after
    the last layer, or from 0 after "mtp.".
    """
    if re.search(TOWER, name):
        return layers + 1
    if layer := re.search(r"(?<!\bmtp\.)\blayers\.(\d+)\.", name):
        return max(0, layers - int(layer[1]))
    return layers + 1 if re.search(EMBEDDING, name) else 0


def _by_parameter(hf_names: Mapping[str, tuple[str, ...]], value: Callable[[str], float]) -> dict[str, Factor]:
    factors: dict[str, Factor] = {}
    for parameter, names in hf_names.items():
        values = [value(name) for name in names]
        factors[parameter] = values[0] if len(set(values)) == 1 else np.asarray(values, np.float32)
    return factors
