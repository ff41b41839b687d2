"""What the learning rate and the weight decay are multiplied by, for each parameter and each of its layers."""

import re
from collections.abc import Callable, Mapping

import numpy as np
from jaxtyping import Float

from jaxtune.config.schema import Optim
from jaxtune.errors import UserError
from jaxtune.models.selection import select

EMBEDDING = "embed_tokens"
NO_DECAY = rf"norm|bias|A_log|sinks|{EMBEDDING}"

# One number, or one for each layer of a stacked parameter.
Factor = float | Float[np.ndarray, " layers"]


def rates(optim: Optim, hf_names: Mapping[str, tuple[str, ...]], layers: int) -> dict[str, Factor]:
    """Factor of the learning rate of every trained parameter: optim.lr_multipliers times that of its layer.

    hf_names: the Hugging Face names of each parameter, one a stacked layer; layers: how many the model has.

    optim.layerwise_lr_decay is that of ELECTRA (Clark et al. 2020), as BEiT has it: layer n, counted from 0, of L gets
    decay^(L - n), the embedding (also one that is the head too) decay^(L + 1), the final norm and the head 1.
    optim.layerwise_lr_decay_bound is ERNIEKit's: layer n gets bound + (1 - bound) n / (L + 2), the embedding the bound
    (so does layer 0), the final norm and the head 1.

    Raises UserError for a regex that matches nothing.
    """
    factors = _factors(optim.lr_multipliers, _all(hf_names), "optim.lr_multipliers")
    bound = optim.layerwise_lr_decay_bound

    def rate(name: str) -> float:
        depth = _depth(name, layers)
        height = max(0, layers - depth) / (layers + 2) if depth else 1.0
        return factors.get(name, 1.0) * optim.layerwise_lr_decay**depth * (bound + (1.0 - bound) * height)

    return _by_parameter(hf_names, rate)


def decays(optim: Optim, hf_names: Mapping[str, tuple[str, ...]]) -> dict[str, Factor]:
    """Weight decay of every trained parameter: optim.weight_decay times optim.decay_multipliers, 0 by optim.no_decay.

    Arguments as those of `rates`. Raises UserError for a regex that matches nothing, or a multiplier that matches only
    parameters without decay.
    """
    names = _all(hf_names)
    if optim.no_decay is None:
        without = frozenset(name for name in names if re.search(NO_DECAY, name))
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
    """Factor of each name that an entry, 'REGEX=FACTOR', matches; the last of several wins."""
    factors = {}
    for entry in entries:
        pattern, _, factor = entry.rpartition("=")
        chosen = select(pattern, names, option)
        if chosen <= without:
            raise UserError(f"{option}={entry!r} matches only parameters without decay; optim.no_decay says which")
        factors |= dict.fromkeys(chosen, float(factor))
    return factors


def _depth(name: str, layers: int) -> int:
    """Distance from the head down to a parameter: 0 for the head, 1 for the last layer."""
    if layer := re.search(r"\blayers\.(\d+)\.", name):
        return layers - int(layer[1])
    return layers + 1 if EMBEDDING in name else 0


def _by_parameter(hf_names: Mapping[str, tuple[str, ...]], value: Callable[[str], float]) -> dict[str, Factor]:
    found: dict[str, Factor] = {}
    for parameter, names in hf_names.items():
        values = [value(name) for name in names]
        found[parameter] = values[0] if len(set(values)) == 1 else np.asarray(values, np.float32)
    return found
