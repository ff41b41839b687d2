"""Stacks: repeated periods of layers with the same structure, so that one loop computes them."""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from jaxtune.models.structure.layer_spec import Experts, Layer


@dataclass(frozen=True)
class StackSpec:
    """A period of layers, repeated `repeats` times from layer `first` on.

    With several `stages` it is a pipeline. A token goes through the first chunk of each stage, then through the second
    chunk of each, and so on; in the stacked arrays, the chunks of a stage are consecutive.
    """

    first: int
    period: tuple[Layer, ...]
    repeats: int
    stages: int = 1
    chunks: int = 1

    @property
    def end(self) -> int:
        """The number after the last layer's."""
        return self.first + len(self.period) * self.repeats

    @property
    def mixtures(self) -> list[int]:
        """The positions of the period whose layers are mixtures of experts."""
        return [position for position, layer in enumerate(self.period) if isinstance(layer.feed_forward, Experts)]

    def layer_numbers(self, position: int) -> list[int]:
        """Return the numbers of the layers at a position of the period, in the order of the stacked arrays."""
        # Layers run in the order (chunks, stages, ...); stacked arrays have stages first, the axis that is sharded.
        repeats = np.arange(self.repeats).reshape(self.chunks, self.stages, -1).swapaxes(0, 1)  # (stages, chunks, ...)
        return (self.first + position + len(self.period) * repeats).reshape(-1).tolist()


MAX_PERIOD = 8  # the longest period: more different layers become several stacks


def stacks(layers: tuple[Layer, ...], stages: int = 1, chunks: int = 1) -> tuple[StackSpec, ...]:
    """Group layers into few scanned stacks, greedily: the period that covers the most layers is the next stack.

    With several `stages`, the longest stack becomes a pipeline: the largest number of its repeats that stages * chunks
    divides. The repeats left over are a stack after the pipeline. There is no pipeline if the longest stack has fewer
    repeats than stages * chunks.
    """
    result, first = [], 0
    while first < len(layers):
        best = (1, 1)  # length of the period, repeats
        for length in range(1, min(MAX_PERIOD, len(layers) - first) + 1):
            period, repeats = layers[first : first + length], 1
            while layers[first + repeats * length : first + (repeats + 1) * length] == period:
                repeats += 1
            # A longer period must repeat: to scan it once would save no compilation.
            if (length == 1 or repeats > 1) and length * repeats > best[0] * best[1]:
                best = (length, repeats)
        length, repeats = best
        result.append(StackSpec(first, layers[first : first + length], repeats))
        first += length * repeats
    return tuple(result) if stages == 1 else _with_pipeline(result, stages, chunks)


def cut_stacks(layers: tuple[Layer, ...], cuts: Iterable[int], first: int = 0) -> tuple[StackSpec, ...]:
    """Group layers into stacks that end before each layer in `cuts`; first: the number of the first layer."""
    parts = ((start, stacks(layers[start:end])) for start, end in pairwise([0, *cuts, len(layers)]))
    return tuple(
        dataclasses.replace(stack, first=first + start + stack.first) for start, part in parts for stack in part
    )


def _with_pipeline(plain: list[StackSpec], stages: int, chunks: int) -> tuple[StackSpec, ...]:
    longest = max(plain, key=lambda stack: len(stack.period) * stack.repeats)
    left = longest.repeats % (stages * chunks)  # repeats that no stage computes
    inside = longest.repeats - left
    if not inside:
        return tuple(plain)
    pipeline = dataclasses.replace(longest, repeats=inside, stages=stages, chunks=chunks)
    after = StackSpec(longest.first + inside * len(longest.period), longest.period, left)
    number = plain.index(longest)
    return (*plain[:number], pipeline, *[after] * bool(left), *plain[number + 1 :])
