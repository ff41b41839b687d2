"""Positions of a row dealt to the devices that share it, so that each has the same part of its attention to compute."""

import math

import numpy as np
from jaxtyping import Int

from jaxtune.columns import PLACE
from jaxtune.data.rows.packed_rows import Row

# Of a row for each device, or fewer where they do not divide it. The fullest device then has 1 to 4% more work than the
# mean; with 16 less than 1%, and chunks are half as long, of which kernels cut more blocks.
CHUNKS = 8


def dealt(row: Row, devices: int) -> Row:
    """The row with all columns in the order in which its devices hold positions, and with the column `place`.

    A device keeps the order of its positions: a kernel then finds the queries that see a block of keys side by side.
    """
    place = places(row["key_start"], devices)
    return {name: column[place] for name, column in row.items()} | {PLACE.name: place}


def places(key_start: Int[np.ndarray, " s"], devices: int) -> Int[np.ndarray, " s"]:
    """The positions of a row, those of the first device first.

    Every device has as many chunks of consecutive positions. Those with most pairs of a query and a key that it sees go
    first, each to the device that has room and the fewest pairs, as SandAI-org/MagiAttention deals them: the
    usual zigzag of chunks balances rows of one document alone.
    """
    length = len(key_start)
    chunks = math.gcd(length // devices, CHUNKS) * devices
    index = np.arange(length).reshape(chunks, -1)
    pairs = np.maximum(index + 1 - key_start.reshape(index.shape), 0).sum(axis=1)
    load, hands = np.zeros(devices, np.int64), [[] for _ in range(devices)]
    for chunk in np.argsort(-pairs, kind="stable"):
        open = [device for device in range(devices) if len(hands[device]) < chunks // devices]
        device = min(open, key=load.__getitem__)
        hands[device].append(chunk)
        load[device] += pairs[chunk]
    order = [chunk for hand in hands for chunk in sorted(hand)]
    return index[order].reshape(-1).astype(PLACE.dtype)
