"""Which mesh axis shards which dimension: one vocabulary of logical names, one set of rules.

A parameter declares logical names for its dimensions ("mlp", "embed"); `spec` turns them into a PartitionSpec.
Imports nothing of jaxtune, so that models may speak this vocabulary.
"""

from dataclasses import dataclass

import jax
from jaxtyping import Array

AXES = ("data", "fsdp", "stage", "expert", "sequence", "tensor")
P = jax.P


@dataclass(frozen=True)
class Rules:
    """Mesh axes of each logical dimension; None is never sharded."""

    vocabulary: str | None = "tensor"
    embed: str | None = "fsdp"
    heads: str | None = "tensor"
    kv_heads: str | None = "tensor"
    mlp: str | None = "tensor"
    layers: None = None
    rank: None = None
    batch: tuple[str, ...] = ("data", "fsdp")
    positions: str = "sequence"


RULES = Rules()


def spec(*names: str | None) -> jax.P:
    """PartitionSpec of dimensions with these logical names."""
    return P(*(None if name is None else getattr(RULES, name) for name in names))


TOKENS = spec("batch", "positions")
ACTIVATIONS = spec("batch", "positions", None)


def sharding(*names: str | None) -> jax.NamedSharding:
    """The same on the current mesh (jax.set_mesh)."""
    return jax.NamedSharding(jax.sharding.get_mesh(), spec(*names))


def gather(weight: Array) -> Array:
    """A weight whole over `fsdp`, as it was over every other axis.

    Called where the weight is used, inside the rematerialised block, so that the gathered copy is made again in the
    backward pass and its gradient comes back reduced and sharded.
    """
    return jax.reshard(weight, P(*(None if axis == "fsdp" else axis for axis in jax.typeof(weight).sharding.spec)))
