"""Sharding: logical names of dimensions, and the rules that map them to mesh axes.

A parameter declares logical names for its dimensions ("mlp", "embed"). `spec` turns these into a PartitionSpec,
`gather` all-gathers a weight for its use, and `by_token` returns the PartitionSpec of activations.
Imports nothing from jaxtune, so that models may import it.
"""

import math
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from functools import partial
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Int

GATHERED = "gathered weight"  # name in policies of jax.checkpoint
AXES = ("data", "fsdp", "stage", "expert", "context", "sequence", "tensor")
P = jax.P
Axes = tuple[str, ...]
Entry = str | Axes | None  # a PartitionSpec's entry for one dimension


@dataclass(frozen=True)
class Layout:
    """Mesh axes that shard each logical dimension of a parameter, outermost first; (): not sharded."""

    vocabulary: Axes = ("tensor",)
    embed: Axes = ("fsdp", "context", "sequence")
    heads: Axes = ("tensor",)
    kv_heads: Axes = ("tensor",)
    mlp: Axes = ("tensor",)
    layers: Axes = ()
    stages: Axes = ("stage",)  # layers of a pipeline, divided over its stages
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
        gathered: axes over which a weight is all-gathered before use; each must shard the tokens.
        batch: axes that shard the rows of a batch.
        positions: axes that shard the positions of a row.
        context: the axes in `positions` over which attention gathers keys and values; over the other ones it exchanges
            positions for heads.
        residual: axes that shard positions between mixers and feed-forwards, whose norms and sums need one position
            only. It may have the axis that shards features elsewhere (sequence parallelism of Korthikanti et al. 2022,
            arXiv:2205.05198).
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
            # The gathered axes are innermost, so that all-gathered neighbours form one contiguous part. In another
            # order XLA would also have to exchange parts between devices.
            if list(axes) != sorted(axes, key=self.gathered.__contains__):
                raise ValueError(f"in {axes} the gathered axes, {self.gathered}, must come last")

    def apart(self, *manual: str) -> "Rules":
        """Return the rules inside `parallel.manual_axes`, where the given axes are manual and shard nothing."""

        def drop_manual(axes: Axes) -> Axes:
            return tuple(axis for axis in axes if axis not in manual)

        def inside(layout: Layout) -> Layout:
            return Layout(*map(drop_manual, astuple(layout)))

        return Rules(
            *(inside(self.parameters), inside(self.gradients), inside(self.optimizer)),
            *(drop_manual(self.gathered), drop_manual(self.batch), drop_manual(self.positions), self.context),
            drop_manual(self.residual),
        )


# RULES.value are the current rules, which `make_mesh` sets; `with RULES(other):` changes them in this thread. A user
# context is part of the key of jax's tracing cache, so programs are traced again when the rules change.
RULES = jax.make_user_context(Rules())


def axes_of(name: str | None, layout: Layout | None = None) -> Axes:
    """Return the mesh axes of a logical dimension, in the layout of stored parameters or in another layout."""
    return () if name is None else getattr(layout or RULES.value.parameters, name)


def shards(axes: Iterable[str], mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh) -> int:
    """Return the number of parts into which the given axes divide a dimension."""
    return math.prod(mesh.shape[axis] for axis in axes)


def spec(*names: str | None, layout: Layout | None = None) -> jax.P:
    """Return the PartitionSpec of a parameter with these logical names, as stored or in another layout.

    An axis shards only the first dimension that names it: the axis of experts shards the experts of a mixture, and
    "embed" in other weights.
    """
    entries, taken = [], set[str]()
    for name in names:
        axes = tuple(axis for axis in axes_of(name, layout) if axis not in taken)
        taken.update(axes)
        entries.append(_entry(axes))
    return P(*entries)


def sharding(*names: str | None) -> jax.NamedSharding:
    """Return the NamedSharding of a stored parameter on the current mesh (jax.set_mesh)."""
    return jax.NamedSharding(jax.sharding.get_mesh(), spec(*names))


def by_token(*names: str | None) -> jax.P:
    """Return the PartitionSpec of activations (rows, positions, *names), named as the weights' output dimensions."""
    rules = RULES.value
    return P(_entry(rules.batch), _entry(rules.positions), *map(gathered_entry, names))


def by_residual() -> jax.P:
    """Return the PartitionSpec of activations (rows, positions, embed) between mixers and feed-forwards."""
    return P(_entry(RULES.value.batch), _entry(RULES.value.residual), None)


def by_head(kept: Axes = ()) -> jax.P:
    """Return the PartitionSpec of activations (rows, positions, heads, features) with whole rows of some heads.

    The axes that otherwise shard positions shard heads instead, as the innermost axes. Axes in `kept` still shard
    positions.
    """
    rules = RULES.value
    exchanged = (axis for axis in rules.positions if axis not in kept)
    return P(_entry(rules.batch), _entry(kept), _entry((*axes_in(gathered_entry("heads")), *exchanged)), None)


def gathered_entry(name: str | None) -> Entry:
    """Return a logical dimension's entry in the PartitionSpec of a gathered weight, and of its output."""
    return drop_gathered_axes(axes_of(name))


def drop_gathered_axes(entry: Entry) -> Entry:
    """Return a PartitionSpec's entry without the axes over which weights are gathered."""
    return _entry(tuple(axis for axis in axes_in(entry) if axis not in RULES.value.gathered))


def axes_in(entry: Entry) -> Axes:
    """Return the mesh axes in an entry of a PartitionSpec."""
    return (entry,) if isinstance(entry, str) else entry or ()


@jax.named_scope("collectives")
def gather(weight: Array, stacked: int = 0) -> Array:
    """All-gather a weight over the axes that the rules gather.

    Other axes stay sharded, and so do the first `stacked` dimensions. Call it right before the weight is used, inside
    the rematerialised block: the gathered copy is then not saved but gathered again in the backward pass (unless the
    policy names GATHERED), and the gradient is reduce-scattered.
    """
    entries = tuple(jax.typeof(weight).sharding.spec)
    whole = jax.reshard(weight, P(*entries[:stacked], *map(drop_gathered_axes, entries[stacked:])))
    return checkpoint_name(whole, GATHERED)


def reduce_early(x: Array, weights: Any) -> tuple[Array, Any]:
    """Return x and the weights, before they are gathered, of the layers that compute with x; both are unchanged.

    In the backward pass, x's gradient waits until the gradients of the weights that are trained are reduce-scattered.
    Nothing else there needs these gradients, so XLA would compute them at the end of the block, when no work is left to
    hide the reduce-scatters.
    """
    specs = [jax.typeof(weight).sharding.spec for weight in jax.tree.leaves(weights)]
    if all(drop_gathered_axes(entry) == entry for spec in specs for entry in spec):
        return x, weights  # nothing is gathered, so nothing is reduce-scattered
    return _with_barrier(x, weights)


@jax.custom_jvp
def _with_barrier(x: Array, weights: Any) -> tuple[Array, Any]:
    return x, weights


@partial(_with_barrier.defjvp, symbolic_zeros=True)
def _with_barrier_jvp(primals: tuple[Array, Any], tangents: tuple[Array, Any]) -> tuple[Any, Any]:
    (dx, *dws), tree = jax.tree.flatten(tangents)
    # A frozen weight keeps its symbolic zero, without which its gradient would be computed.
    waiting = {n: dw for n, dw in enumerate(dws) if not _is_zero(dw)}
    if waiting and not _is_zero(dx):
        # The transpose of this barrier is a barrier of the gradients.
        dx, waiting = jax.lax.optimization_barrier((dx, waiting))
    return primals, jax.tree.unflatten(tree, (dx, *(waiting.get(n, dw) for n, dw in enumerate(dws))))


def _is_zero(tangent: Any) -> bool:
    return isinstance(tangent, jax.custom_derivatives.SymbolicZero)


@jax.named_scope("collectives")
def reshard_to(array: Array, spec: jax.P | None) -> Array:
    """Return the array with another PartitionSpec; None: unchanged."""
    return array if spec is None else jax.reshard(array, spec)


def take_element(tree: Any, index: Int[Array, ""] | int, axis: int = 0) -> Any:
    """Return the element at an index along an axis of every leaf, with the sharding of its other axes."""

    def one(leaf: Array) -> Array:
        spec = list(jax.typeof(leaf).sharding.spec)
        del spec[axis]
        # Resharding moves nothing: jax forgets how an axis of size 1, such as the axis of rows, is sharded.
        return jax.reshard(jax.lax.dynamic_index_in_dim(leaf, index, axis, keepdims=False), P(*spec))

    return jax.tree.map(one, tree)


def _entry(axes: Axes) -> Entry:
    return axes[0] if len(axes) == 1 else axes or None
