"""Identify the layers of a saved state by parameter and layer number, not by stack, so that the grouping may change.

Equal layers are stacked into one array (a leaf). If a later version or another option groups the layers into other
stacks, each layer is cut from its saved leaf and joined into its new one. A leaf of a stack has its layers along the
leading axis, or is a scalar shared by all layers.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxtune.errors import UserError

# For each parameter: its name inside a layer, and the numbers of the layers stacked in it. A parameter outside the
# layers has its full name and no layer numbers.
Grouping = Mapping[str, tuple[str, tuple[int, ...]]]
Leaves = dict[str, Any]  # arrays, or their shapes and dtypes, by path: see `structure.leaves_by_name`


class LayerPiece(NamedTuple):
    """One layer of a leaf; or the whole leaf, if it has no layers or is a scalar shared by all layers.

    Attributes:
        family: the leaf's path without its stack; leaves of one family differ only in their layers.
        leaf: the leaf's path.
        index: position along the leading axis; None: the whole leaf.
        shape: shape, with a leading 1 in place of the layers.
        dtype: dtype of the leaf.
    """

    family: str
    leaf: str
    index: int | None
    shape: tuple[int, ...]
    dtype: np.dtype


def pieces(leaves: Leaves, grouping: Grouping) -> dict[str, LayerPiece]:
    """Return the pieces of all leaves by readable names, for example 'trained/mlp.down.weight of layer 7'.

    Raises ValueError if a leaf of a stack neither has its layers along the leading axis nor is a scalar.
    """
    result: dict[str, LayerPiece] = {}
    for leaf, array in leaves.items():
        # The parameter's name is one part of the path, also for its moments in the optimizer, which are stacked like
        # it.
        path = leaf.split("/")
        local, layers = next((grouping[part] for part in path if part in grouping), ("", ()))
        family = "/".join(local if part in grouping else part for part in path)
        shape, dtype = tuple(array.shape), np.dtype(array.dtype)
        if layers and shape and shape[0] != len(layers):
            raise ValueError(f"{leaf} {shape} does not have the {len(layers)} layers of its stack along its first axis")
        whole = LayerPiece(family, leaf, None, shape, dtype)
        of_layer = {
            f"{family} of layer {layer}": whole._replace(index=index, shape=(1, *shape[1:])) if shape else whole
            for index, layer in enumerate(layers)
        }
        added = of_layer if layers else {family: whole}
        if twice := added.keys() & result.keys():
            raise ValueError(f"{leaf} and {result[min(twice)].leaf} both have {min(twice)}")
        result |= added
    return result


def load(
    read: Callable[[Leaves], Leaves],
    saved: Leaves,
    wanted: Leaves,
    saved_pieces: dict[str, LayerPiece],
    wanted_pieces: dict[str, LayerPiece],
) -> Leaves:
    """Load the leaves of `wanted`, regrouping layers where the saved stacks differ.

    A leaf with the same layers as its saved leaf is read directly into its sharding. Others are cut and joined on the
    devices, one family at a time, so that only the leaves of one family are in memory in addition to the result.

    Args:
        read: reads saved leaves, given their shapes, dtypes and shardings by path.
        saved: shapes and dtypes of the saved leaves.
        wanted: shapes, dtypes and shardings of the leaves to load.
        saved_pieces: the pieces of `saved`, which must include all of `wanted_pieces`.
        wanted_pieces: the pieces of `wanted`.

    Raises UserError if stacks that are joined into one differ in a scalar that their layers then share.
    """
    # Leaves that need regrouping: some layer was at another index, or in a leaf of another shape.
    moved = {
        piece.leaf
        for name, piece in wanted_pieces.items()
        if saved_pieces[name] != piece or saved[piece.leaf].shape != wanted[piece.leaf].shape
    }
    made_of: dict[str, dict[str, list[LayerPiece]]] = defaultdict(lambda: defaultdict(list))
    for name, piece in wanted_pieces.items():
        if piece.leaf in moved:
            made_of[piece.family][piece.leaf].append(saved_pieces[name])
    as_saved = {leaf: abstract for leaf, abstract in wanted.items() if leaf not in moved}
    arrays = read(as_saved) if as_saved else {}
    for leaves in made_of.values():
        like = wanted[next(iter(leaves))]  # leaves of a family share dtype and sharding
        # A saved leaf may give layers to several new leaves; it is read once.
        sources = {part.leaf: part for parts in leaves.values() for part in parts}
        abstract = {
            name: jax.ShapeDtypeStruct(saved[name].shape, like.dtype, sharding=_source_sharding(part, like.sharding))
            for name, part in sources.items()
        }
        arrays |= _join(read(abstract), leaves, {leaf: wanted[leaf].sharding for leaf in leaves})
    return arrays


def _source_sharding(part: LayerPiece, sharding: jax.sharding.Sharding) -> jax.sharding.Sharding:
    """A wanted leaf's sharding, but in device memory and with unsharded layers, so that layers can be cut out."""
    if part.index is None or not isinstance(sharding, jax.NamedSharding):
        return sharding
    # Without a memory kind, the sharding is in device memory, even if the wanted leaf is offloaded.
    return jax.NamedSharding(sharding.mesh, jax.P(None, *sharding.spec[1:]))


def _join(sources: Leaves, leaves: dict[str, list[LayerPiece]], shardings: dict[str, jax.sharding.Sharding]) -> Leaves:
    """Join each leaf from its pieces of saved leaves. Raises UserError like `load`."""
    for parts in leaves.values():
        # Compared bit by bit, so that a NaN equals itself.
        if parts[0].index is None and len({np.asarray(sources[part.leaf]).tobytes() for part in parts}) > 1:
            raise UserError(
                f"the checkpoint cannot be restored into other stacks of layers: {parts[0].family} is not the same in "
                f"{' and '.join(sorted({part.leaf for part in parts}))}"
            )

    def join(sources: Leaves) -> Leaves:
        def cut(part: LayerPiece) -> jax.Array:
            leaf, index = sources[part.leaf], part.index
            return leaf if index is None else jax.lax.slice_in_dim(leaf, index, index + 1)

        def one(parts: list[LayerPiece]) -> jax.Array:
            return cut(parts[0]) if parts[0].index is None else jnp.concatenate([cut(part) for part in parts])

        return {leaf: one(parts) for leaf, parts in leaves.items()}

    return jax.jit(join, out_shardings=shardings)(sources)
