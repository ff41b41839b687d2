"""Packing by two budgets: parcels of tokens and patches into rows that have room for a number of both.

`best_fit` and `first_fit` return the row of each parcel as their namesakes for tokens only in `packing` do.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable

import numpy as np
from jaxtyping import Int64


def best_fit(
    lengths: memoryview, patches: memoryview, seq_len: int, patches_per_row: int, max_open: int | None
) -> Int64[np.ndarray, "parcels"]:
    """Return the row of each parcel: of the rows with room for its patches, the one with the least space that suffices.

    Rows are listed by their room for patches, the greatest number of patches of any parcel that fits, and by their free
    positions. Each room has a bit set of the free positions that occur, and a binary tree finds the smallest one
    among all rooms that suffice, in time logarithmic in the number of rooms.
    """
    wanted = sorted(set(patches))  # the numbers of patches that occur: room i is for wanted[i]
    leaves = 1 << (len(wanted) - 1).bit_length()
    # A leaf is a room, any other node i has the sizes of its children 2i and 2i + 1. Bit n: a row has n free positions.
    sizes = [0] * (2 * leaves)
    open_rows: dict[tuple[int, int], list[int]] = {}  # by room and free positions
    free: list[tuple[int, int]] = []  # free positions and patches of each row
    oldest = 0  # the oldest row that may still be open

    def set_sizes(room: int, bits: int) -> None:
        node = leaves + room
        sizes[node] = bits
        while node > 1:
            node //= 2
            sizes[node] = sizes[2 * node] | sizes[2 * node + 1]

    def remove(row: int) -> None:
        room = bisect_right(wanted, free[row][1]) - 1
        rows = open_rows.get((room, free[row][0]), [])
        if row in rows:
            rows.remove(row)
            if not rows:
                set_sizes(room, sizes[leaves + room] ^ 1 << free[row][0])

    result = np.empty(len(lengths), np.int64)
    for i, (length, count) in enumerate(zip(lengths, patches)):
        found = _find(sizes, leaves + bisect_left(wanted, count), length)
        if found is not None:
            leaf, space = found
            rows = open_rows[leaf - leaves, space]
            row = rows.pop()
            if not rows:
                set_sizes(leaf - leaves, sizes[leaf] ^ 1 << space)
        else:
            row = len(free)
            free.append((seq_len, patches_per_row))
            # Close the oldest row, full or not, so that a late document cannot land far before its neighbours.
            if max_open is not None and row - oldest >= max_open:
                remove(oldest)
                oldest += 1
        space, room = free[row][0] - length, free[row][1] - count
        free[row] = space, room
        place = bisect_right(wanted, room) - 1
        if space and place >= 0:  # no parcel fits into other rows
            rows = open_rows.setdefault((place, space), [])
            rows.append(row)
            if len(rows) == 1:
                set_sizes(place, sizes[leaves + place] | 1 << space)
        result[i] = row
    return result


def _find(sizes: list[int], first: int, length: int) -> tuple[int, int] | None:
    """Return the leaf, from leaf `first` on, with the smallest size of at least `length`, and the size; None: none."""
    # The subtrees that hold the leaves from `first` on: it, and each right neighbour on the way to the root.
    nodes, node = [first], first
    while node > 1:
        if node % 2 == 0:
            nodes.append(node + 1)
        node //= 2
    fitting = 0
    for node in nodes:
        fitting |= sizes[node]
    fitting >>= length
    if not fitting:
        return None
    space = length + (fitting & -fitting).bit_length() - 1  # the lowest bit
    node = next(node for node in nodes if sizes[node] >> space & 1)
    while 2 * node < len(sizes):
        node *= 2
        node += not sizes[node] >> space & 1  # to the left child if it has the size
    return node, space


def first_fit(
    lengths: memoryview, patches: memoryview, seq_len: int, patches_per_row: int
) -> Int64[np.ndarray, "parcels"]:
    """Return the row of each parcel: the first with room for its tokens and its patches."""
    # Two neighbouring rows hold more than a row's tokens or more than its patches; otherwise the second would not have
    # been opened.
    most_rows = min(len(lengths), 2 * (sum(lengths) // seq_len + sum(patches) // patches_per_row + 1) + 1)
    leaves = 1 << (most_rows - 1).bit_length()
    # Binary trees of free positions and of free patches: a leaf is a row, any other node i has the maximum of its
    # children 2i and 2i + 1.
    free, room = [seq_len] * (2 * leaves), [patches_per_row] * (2 * leaves)
    result = np.empty(len(lengths), np.int64)
    for i, (length, count) in enumerate(zip(lengths, patches)):
        node = 1
        while True:
            if free[node] >= length and room[node] >= count:
                if node >= leaves:
                    break
                node *= 2
                continue
            # The two maxima may be of different rows, so a node may turn out to have no row: to the next one.
            while node % 2:
                node //= 2
            node += 1
        result[i] = node - leaves
        free[node] -= length
        room[node] -= count
        while node > 1:
            node //= 2
            free[node] = max(free[2 * node], free[2 * node + 1])
            room[node] = max(room[2 * node], room[2 * node + 1])
    return result


def next_fit(
    lengths: memoryview, patches: Iterable[int], seq_len: int, patches_per_row: int
) -> Int64[np.ndarray, "parcels"]:
    """Return the row of each parcel: the last row, or a new one if the last has no room."""
    row, free, room = 0, seq_len, patches_per_row
    result = np.empty(len(lengths), np.int64)
    for i, (length, count) in enumerate(zip(lengths, patches)):
        if length > free or count > room:
            row, free, room = row + 1, seq_len, patches_per_row
        free, room = free - length, room - count
        result[i] = row
    return result
