"""The methods that merge checkpoints, and their options."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxtune.errors import UserError


@dataclass(frozen=True)
class MergeMethod:
    """A method of `methods`, and the options that it reads.

    Attributes:
        differences: whether it merges the models' differences from a base.
        normalize: whether it divides by the sum of the weights if --normalize does not say.
        options: the options of `MergeOptions` that it reads.
    """

    differences: bool
    normalize: bool
    options: tuple[str, ...]

    @property
    def prunes(self) -> bool:
        """Whether it sets a part of each difference to zero; merged adapters are then not their sum."""
        return "density" in self.options


_WEIGHTED = ("weights", "normalize")
# Whether they normalise is mergekit's default.
METHODS = {
    "linear": MergeMethod(False, True, _WEIGHTED),
    "slerp": MergeMethod(False, False, ("t",)),
    "task_arithmetic": MergeMethod(True, False, (*_WEIGHTED, "lambda")),
    "ties": MergeMethod(True, True, (*_WEIGHTED, "lambda", "density")),
    "dare_linear": MergeMethod(True, False, (*_WEIGHTED, "lambda", "density", "seed")),
    "dare_ties": MergeMethod(True, False, (*_WEIGHTED, "lambda", "density", "seed")),
}


@dataclass(frozen=True)
class MergeOptions:
    """Options of a merge.

    Attributes:
        method: one of METHODS.
        weights: a number for each model.
        normalize: whether to divide by the sum of the weights (with signs elected, of those that count).
        scale: factor of the merged difference, --lambda.
        density: share of the values of each difference that are kept.
        seed: seed of the values that DARE drops.
        t: position between two models; 0: the first, 1: the second.
    """

    method: str
    weights: tuple[float, ...]
    normalize: bool
    scale: float = 1.0
    density: float = 0.5
    seed: int = 0
    t: float = 0.5

    @property
    def elects_signs(self) -> bool:
        """Whether only the differences count that have the sign of their sum."""
        return self.method.endswith("ties")  # dare_ties too


def merge_options(name: str, models: int, given: Mapping[str, Any]) -> MergeOptions:
    """Return the options of a method for this number of models.

    given: the options by flag that have a value; others take their defaults.

    Raises:
        UserError: the method does not read an option, or a value does not fit.
    """
    method = METHODS[name]
    if unread := sorted(given.keys() - set(method.options)):
        raise UserError(f"--{unread[0]}: has no effect with --method={name}, which reads {_flags(method.options)}")
    if models < 2 or (name == "slerp" and models != 2):
        raise UserError(f"--models: {models} given; --method={name} merges {'2' if name == 'slerp' else '2 or more'}")
    weights = tuple(given.get("weights") or (1.0,) * models)
    if len(weights) != models:
        raise UserError(f"--weights: {len(weights)} for {models} models; give one number for each of --models")
    normalize = bool(given.get("normalize", method.normalize))
    if not all(map(math.isfinite, weights)) or not any(weights):
        raise UserError(f"--weights={_numbers(weights)}: they must be finite and not all 0")
    if normalize and abs(math.fsum(weights)) < 1e-8:
        raise UserError(
            f"--weights={_numbers(weights)}: their sum is 0; add --nonormalize, which does not divide by it"
        )
    if not 0 < given.get("density", 1) <= 1:
        raise UserError(f"--density={given['density']}: the share of values that are kept, above 0 and at most 1")
    further = {"scale" if flag == "lambda" else flag: given[flag] for flag in given.keys() - set(_WEIGHTED)}
    return MergeOptions(name, weights, normalize, **further)


def _flags(names: Sequence[str]) -> str:
    return ", ".join(f"--{name}" for name in names)


def _numbers(values: Sequence[float]) -> str:
    return ",".join(map(repr, values))
