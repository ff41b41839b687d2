"""Which mesh axes shard which dimension: one vocabulary of logical names, one set of rules.

A parameter declares logical names for its dimensions ("mlp", "embed"); `spec` turns them into a PartitionSpec, `gather`
all-gathers a weight where it is used, and `by_token` gives the PartitionSpec of activations.
Imports nothing from jaxtune, so that models may use it.
"""

import math
from collections.abc import Iterable
from dataclasses import astuple, dataclass

import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

GATHERED = "gathered weight"  # in policies of jax.checkpoint
AXES = ("data", "fsdp", "stage", "expert", "context", "sequence", "tensor")
P = jax.P
Axes = tuple[str, ...]
Entry = str | Axes | None  # a PartitionSpec's entry for one dimension


@dataclass(frozen=True)
class Layout:
    """Mesh axes that shard each logical dimension of a parameter, the outermost first; (): not sharded."""

    vocabulary: Axes = ("tensor",)
    embed: Axes = ("fsdp", "context", "sequence")
    heads: Axes = ("tensor",)
    kv_heads: Axes = ("tensor",)
    mlp: Axes = ("tensor",)
    layers: Axes = ()
    stages: Axes = ("stage",)  # layers that are divided over the stages of a pipeline
    experts: Axes = ()
    rank: Axes = ()


@dataclass(frozen=True)
class Rules:
    """How parameters, gradients, optimizer state and batches are sharded.

    The default is ZeRO 3 (Rajbhandari et al. 2020, arXiv:1910.02054). With parameters=Layout(embed=()), replicated over
    `fsdp`, it is ZeRO 2; with gradients=Layout(embed=()) as well, ZeRO 1.

    Attributes:
        parameters: layout of the stored parameters.
        gradients: layout of the gradients summed over micro-batches.
        optimizer: layout of the optimizer state.
        gathered: axes over which a weight is all-gathered where it is used; all of them must shard the tokens.
        batch: axes that shard the rows of a batch.
        positions: axes that shard the positions of a row.
        context: of these, the axes over which attention gathers keys and values; over the others it exchanges positions
            for heads.
        residual: axes that shard them between mixers and feed-forwards, where norms and sums are of one position: also
            over the axis whose devices share the features elsewhere (Korthikanti et al. 2022, arXiv:2205.05198).
    """

    parameters: Layout = Layout()
    gradients: Layout = Layout()
    optimizer: Layout = Layout()
    gathered: Axes = ("fsdp", "context", "sequence")
    batch: Axes = ("data", "fsdp")
    positions: Axes = ("context", "sequence")
    context: Axes = ("context",)
    residual: Axes = ("context", "sequence", "tensor")

    def __post_init__(self):
        if idle := set(self.gathered) - {*self.batch, *self.positions}:
            raise ValueError(
                f"weights are gathered over {sorted(idle)}, whose devices would all compute the same tokens"
            )
        for axes in astuple(self.parameters):
            if list(axes) != sorted(axes, key=self.gathered.__contains__):
                raise ValueError(f"of {axes} the axes that are gathered, {self.gathered}, must come last")

    def apart(self, *manual: str) -> "Rules":
        """The rules of devices at one place along these axes, which shard nothing there (`parallel.manual_axes`)."""

        def without(axes: Axes) -> Axes:
            return tuple(axis for axis in axes if axis not in manual)

        def inside(layout: Layout) -> Layout:
            return Layout(*map(without, astuple(layout)))

        return Rules(
            *(inside(self.parameters), inside(self.gradients), inside(self.optimizer)),
            *(without(self.gathered), without(self.batch), without(self.positions), self.context),
            without(self.residual),
        )


# The rules in use are RULES.value, as `make_mesh` sets them. `with RULES(other):` uses others, in this thread. A user
# context is part of jax's tracing cache key, so that programs are then traced again.
RULES = jax.make_user_context(Rules())


def axes_of(name: str | None, layout: Layout | None = None) -> Axes:
    """Mesh axes of a parameter's logical dimension, as it is stored or in another layout."""
    return () if name is None else getattr(layout or RULES.value.parameters, name)


def shards(axes: Iterable[str], mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh) -> int:
    """The number of parts into which these axes divide a dimension."""
    return math.prod(mesh.shape[axis] for axis in axes)


def spec(*names: str | None, layout: Layout | None = None) -> jax.P:
    """PartitionSpec of a parameter whose dimensions have these logical names, as it is stored or in another layout.

    An axis that shards one dimension shards no later one: of a mixture's experts, not what it shards of other weights.
    """
    places, taken = [], set[str]()
    for name in names:
        axes = tuple(axis for axis in axes_of(name, layout) if axis not in taken)
        taken.update(axes)
        places.append(_entry(axes))
    return P(*places)


def sharding(*names: str | None) -> jax.NamedSharding:
    """NamedSharding of a stored parameter on the current mesh (jax.set_mesh)."""
    return jax.NamedSharding(jax.sharding.get_mesh(), spec(*names))


def by_token(*names: str | None) -> jax.P:
    """PartitionSpec of activations (rows, positions, *names); a name is that of the weight dimension that made it."""
    rules = RULES.value
    return P(_entry(rules.batch), _entry(rules.positions), *map(used, names))


def by_residual() -> jax.P:
    """PartitionSpec of activations (rows, positions, embed) between mixers and feed-forwards."""
    return P(_entry(RULES.value.batch), _entry(RULES.value.residual), None)


def by_head(kept: Axes = ()) -> jax.P:
    """PartitionSpec of activations (rows, positions, heads, features) of which a device has whole rows of some heads.

    The axes that shard positions elsewhere shard heads, the innermost; but for those in `kept`, which still shard
    positions.
    """
    rules = RULES.value
    exchanged = (axis for axis in rules.positions if axis not in kept)
    return P(_entry(rules.batch), _entry(kept), _entry((*axes_in(used("heads")), *exchanged)), None)


def used(name: str | None) -> Entry:
    """The entry of a logical dimension in the PartitionSpec of a gathered weight and of the activations it makes."""
    return ungathered(axes_of(name))


def ungathered(entry: Entry) -> Entry:
    """A PartitionSpec's entry without the axes over which weights are gathered."""
    return _entry(tuple(axis for axis in axes_in(entry) if axis not in RULES.value.gathered))


def axes_in(entry: Entry) -> Axes:
    """The mesh axes in an entry of a PartitionSpec."""
    return (entry,) if isinstance(entry, str) else entry or ()


def gather(weight: Array, stacked: int = 0) -> Array:
    """All-gather a weight over the axes that the rules gather; other axes, and so many leading ones, stay sharded.

    Called where the weight is used, inside the rematerialised block: the gathered copy is not saved but made again in
    the backward pass, unless the policy names GATHERED, and the gradient is reduce-scattered.
    """
    places = tuple(jax.typeof(weight).sharding.spec)
    whole = jax.reshard(weight, P(*places[:stacked], *map(ungathered, places[stacked:])))
    return checkpoint_name(whole, GATHERED)


def moved(array: Array, place: jax.P | None) -> Array:
    """The array with another PartitionSpec; None: as it is."""
    return array if place is None else jax.reshard(array, place)


def _entry(axes: Axes) -> Entry:
    return axes[0] if len(axes) == 1 else axes or None
