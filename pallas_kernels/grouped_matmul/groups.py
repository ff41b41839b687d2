"""The order of rows for a grouped product: sorted by group, each group in whole blocks.

Shapes: a items, g groups, n blocks, m rows.
"""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from pallas_kernels.gpus import current_device


@partial(jax.tree_util.register_dataclass, data_fields=("block_group", "first"), meta_fields=("backend",))
@dataclass(frozen=True)
class Groups:
    """The group, and so the weight, of each block of rows.

    Attributes:
        block_group: the group of each block, ascending; the number of groups for a block without rows.
        first: the first block of each group, followed by the number of blocks that have rows.
        backend: a name in BACKENDS of `pallas_kernels.grouped_matmul`, or 'auto'.
    """

    block_group: Int[Array, " n"]
    first: Int[Array, " g+1"]
    backend: str = "auto"

    def filled(self, items: float, rows: int) -> float:
        """Return the expected fraction of `rows` in blocks that have items; a group fills its last block by half."""
        block, groups = rows / len(self.block_group), len(self.first) - 1
        return min(1.0, (items + groups * block / 2) / rows)


class Arrangement(NamedTuple):
    """The assignment of items to rows, by group.

    Attributes:
        groups: the group of each block of rows.
        row_of: the row of each item; past the last row if the item has no group.
        item_of: the item in each row; the number of items for a row without an item.
    """

    groups: Groups
    row_of: Int[Array, " a"]
    item_of: Int[Array, " m"]


def arrange(group_of: Int[Array, " a"], groups: int, backend: str = "auto", block: int | None = None) -> Arrangement:
    """Assign rows to items by their groups, in blocks of `block` rows; None: `block_of` chooses the block size.

    An item whose group is the number of groups has no row. Items of a group keep their order.

    The number of rows is static and enough for every assignment of items to groups: a group may fill its last block
    only in part, so there are `groups` blocks more than full blocks.
    """
    items = len(group_of)
    block = block or block_of(items, groups)
    blocks = items // block + groups
    # Items without a group have number `groups`, which bincount drops.
    counts = jnp.bincount(group_of, length=groups)
    # Every group starts a new block.
    first = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(-(-counts // block)).astype(jnp.int32)])
    order = jnp.argsort(group_of, stable=True).astype(jnp.int32)
    ordered = group_of[order]
    before = jnp.cumsum(counts) - counts  # number of items in earlier groups
    position = jnp.arange(items)
    row = first[ordered] * block + position - before[ordered]
    # Items without a group get distinct rows past the end, which the scatter below drops.
    row = jnp.where(ordered < groups, row, blocks * block + position).astype(jnp.int32)
    # `order` is a permutation, so row_of is its inverse and no two updates collide.
    row_of = jnp.zeros(items, jnp.int32).at[order].set(row, unique_indices=True)
    item_of = jnp.full(blocks * block, items, jnp.int32).at[row].set(order, mode="drop", unique_indices=True)
    # The number of groups that end at or before a block: its own group, or `groups` after the last one.
    block_group = jnp.searchsorted(first[1:], jnp.arange(blocks), side="right").astype(jnp.int32)
    return Arrangement(Groups(block_group, first, backend), row_of, item_of)


def block_of(items: int, groups: int) -> int:
    """Return the rows of a block: half of a group's average number of items, on a CPU a quarter; within 16 to 128.

    With half at most a quarter of the rows is empty. Fewer than 16 rows do not fill a matrix instruction; more than 128
    rows do not fit into a program. On a CPU blocks of a group share one copy of the weight, so smaller ones cost less
    (with 256 items in a group 32, 64 and 128 rows were tried).
    """
    part = max(1, items // groups // (4 if current_device().platform == "cpu" else 2))
    # A power of two, rounded down.
    return min(128, max(16, 1 << part.bit_length() - 1))
