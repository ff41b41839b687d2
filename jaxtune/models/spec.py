"""What a decoder is made of: a frozen description, computed from a Hugging Face config.json by a family."""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding (Su et al. 2021) and how its frequencies are stretched."""

    theta: float
    kind: Literal["default", "linear", "dynamic", "yarn", "llama3"] = "default"
    factor: float = 1.0
    original_positions: int = 0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclass(frozen=True)
class Layer:
    """One layer's structure. Equal layers are stacked and scanned; an unlike one starts a new stack."""

    window: int | None = None
    adapters: frozenset[str] = frozenset()  # linears with a LoRA adapter, for example "mlp.down"
    frozen: frozenset[str] = frozenset()  # parameters that are not trained, for example "mlp.down.weight"
    quantized: frozenset[str] = frozenset()  # parameters stored in 4 or 8 bits
    low_precision: frozenset[str] = frozenset()  # weights whose products are computed in 4 or 8 bits
    float32: frozenset[str] = frozenset()  # weights whose products are computed in float32, as in recipe fp32


@dataclass(frozen=True)
class Adapter:
    """Size and scale of every LoRA adapter."""

    rank: int
    scale: float
    dropout: float


@dataclass(frozen=True)
class ModelSpec:
    """A decoder-only transformer."""

    family: str
    vocabulary: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: tuple[Layer, ...]
    rope: Rope
    norm_epsilon: float
    max_positions: int
    tied: bool
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    initializer_range: float = 0.02
    adapter: Adapter | None = None
    frozen: frozenset[str] = frozenset()  # parameters outside the layers that are not trained

    @property
    def padded_vocabulary(self) -> int:
        """Rows of the embedding and head: a multiple of 256 whatever the mesh, so that checkpoints reshard."""
        return -(-self.vocabulary // 256) * 256

    def with_sites(self, field: str, sites: Iterable[tuple[int | None, str]]) -> "ModelSpec":
        """With these, (layer, name inside it), in a field of the layers; those that differ in it are not stacked."""
        sites = set(sites)
        layers = tuple(
            dataclasses.replace(layer, **{field: frozenset(site for at, site in sites if at == number)})
            for number, layer in enumerate(self.layers)
        )
        return dataclasses.replace(self, layers=layers)


@dataclass(frozen=True)
class StackSpec:
    """`repeats` times a period of layers, starting at layer `first`."""

    first: int
    period: tuple[Layer, ...]
    repeats: int

    def layer_numbers(self, position: int) -> list[int]:
        """Layers at this position of the period, in the order in which they are stacked."""
        return [self.first + position + i * len(self.period) for i in range(self.repeats)]


MOST_UNLIKE_LAYERS = 8  # in a period: more would rather be several stacks


def stacks(layers: tuple[Layer, ...]) -> tuple[StackSpec, ...]:
    """Group layers into as few scanned stacks as a greedy walk finds: the period that covers most layers comes next."""
    found, first = [], 0
    while first < len(layers):
        best = (1, 1)  # length of the period, repeats
        for length in range(1, min(MOST_UNLIKE_LAYERS, len(layers) - first) + 1):
            period, repeats = layers[first : first + length], 1
            while layers[first + repeats * length : first + (repeats + 1) * length] == period:
                repeats += 1
            if (length == 1 or repeats > 1) and length * repeats > best[0] * best[1]:
                best = (length, repeats)
        length, repeats = best
        found.append(StackSpec(first, layers[first : first + length], repeats))
        first += length * repeats
    return tuple(found)
