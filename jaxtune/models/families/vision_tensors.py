"""Vision towers in Hugging Face's files: the names of their tensors, and how they are read from config.json."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxtune.models.places import Tensor
from jaxtune.models.structure.model_spec import Vision

Names = Mapping[str, str | Tensor]


@dataclass(frozen=True)
class VisionTensors:
    """The vision tower of a family.

    Attributes:
        layer: the tensor of each parameter of a layer, as in the family's NAMES; layers count from 0.
        outside: the tensor of each other parameter of the tower, by its name in the tower.
        deepstack: the tensor of each parameter of a further projector, with {number}.
        tensors: a regex for all their tensors.
        read: returns the tower of a config.json.
    """

    layer: Names
    outside: Names
    tensors: str
    read: Callable[[Mapping[str, Any]], Vision]
    deepstack: Mapping[str, str] = field(default_factory=dict)

    def names(self, vision: Vision) -> dict[str, str | Tensor]:
        """Return the tensor of each parameter outside the layers, by its name in the decoder."""
        names: dict[str, str | Tensor] = {f"vision.{name}": hf for name, hf in self.outside.items()}
        for number in range(len(vision.deepstack)):
            names |= {f"vision.deepstack.{number}.{n}": hf.format(number=number) for n, hf in self.deepstack.items()}
        return names
