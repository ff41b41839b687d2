"""How rows are put in order for a grouped product: sorted by group, each group in whole blocks."""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int


@partial(jax.tree_util.register_dataclass, data_fields=("block_group", "first"), meta_fields=("backend",))
@dataclass(frozen=True)
class Groups:
    """Which weight multiplies each block of rows.

    Attributes:
        block_group: the group of each block, ascending; the number of groups where a block has no row.
        first: the first block of each group, and last the number of blocks that have rows.
        backend: what multiplies, a name in BACKENDS of `pallas_kernels.grouped_matmul` or 'auto'.
    """

    block_group: Int[Array, " n"]
    first: Int[Array, " g+1"]
    backend: str = "auto"


class Arrangement(NamedTuple):
    """Items put in rows, by group.

    row_of: the row of each item; past the last row where its group is not one of these. item_of: the item in each row;
    the number of items where there is none.
    """

    groups: Groups
    row_of: Int[Array, " a"]
    item_of: Int[Array, " m"]


def arrange(group_of: Int[Array, " a"], groups: int, backend: str = "auto", block: int | None = None) -> Arrangement:
    """Rows for items of these groups, in blocks of `block` rows; None: as many as suit so many items and groups.

    An item whose group is the number of groups has no row.

    Items of a group keep their order. The number of rows is the most that any items need: a group fills its last block
    in part, so there are `groups` blocks more than full ones.
    """
    items = len(group_of)
    block = block or block_of(items, groups)
    blocks = items // block + groups
    counts = jnp.bincount(group_of, length=groups)
    first = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(-(-counts // block)).astype(jnp.int32)])
    order = jnp.argsort(group_of, stable=True).astype(jnp.int32)
    ordered = group_of[order]
    before = jnp.cumsum(counts) - counts  # items of the groups before
    place = jnp.arange(items)
    row = first[ordered] * block + place - before[ordered]
    row = jnp.where(ordered < groups, row, blocks * block + place).astype(jnp.int32)
    row_of = jnp.zeros(items, jnp.int32).at[order].set(row, unique_indices=True)
    item_of = jnp.full(blocks * block, items, jnp.int32).at[row].set(order, mode="drop", unique_indices=True)
    block_group = jnp.searchsorted(first[1:], jnp.arange(blocks), side="right").astype(jnp.int32)
    return Arrangement(Groups(block_group, first, backend), row_of, item_of)


def block_of(items: int, groups: int) -> int:
    """Rows of a block: half of what a group has on average, so that a quarter of the rows is empty or less; 16 to 128.

    Fewer than 16 do not fill a matrix instruction, more than 128 no program.
    """
    half = max(1, items // groups // 2)
    return min(128, max(16, 1 << half.bit_length() - 1))
