"""Load batches from a row number on, as sharded arrays. Each process reads only the rows of its devices."""

import sys
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxtune.columns import NEXT_TOKEN, OF_PATCHES, PLACE, Column
from jaxtune.config.schema import DataOptions
from jaxtune.data.rows.deal import deal_row
from jaxtune.data.rows.packed_rows import Row, Rows
from jaxtune.data.rows.streams import OpenStream
from jaxtune.parallel.layout import RULES, shards


def needed_rows(sharding: NamedSharding, shape: tuple[int, int, int]) -> list[tuple[int, int]]:
    """Return the (micro-batch, row) pairs that this process's devices hold, wholly or in part, sorted."""
    # Devices may hold the same rows (replicas) or parts of one row (mesh.context): each row is read once.
    needed = set()
    indices: Any = sharding.addressable_devices_indices_map(shape)
    for index in indices.values():
        micro_batches, rows = (range(size)[bounds] for size, bounds in zip(shape, index[:2]))
        needed.update((i, j) for i in micro_batches for j in rows)
    return sorted(needed)


def abstract_batch(
    shape: tuple[int, int, int], sharding: NamedSharding, columns: tuple[Column, ...] = NEXT_TOKEN
) -> dict[str, jax.ShapeDtypeStruct]:
    """Return shapes, dtypes and shardings of a batch of (accum, rows_per_micro, seq_len), as `batches` yields it."""
    columns = columns if _devices_of_a_row(sharding) == 1 else (*columns, PLACE)
    row_sharding = _by_row(sharding)
    batch = {
        column.name: jax.ShapeDtypeStruct(
            column.shape(*shape), column.dtype, sharding=row_sharding if column.name in OF_PATCHES else sharding
        )
        for column in columns
    }
    return batch | {"row": jax.ShapeDtypeStruct(shape[:2], np.int32, sharding=row_sharding)}


def batches(
    rows: Rows | OpenStream,
    shape: tuple[int, int, int],
    sharding: NamedSharding,
    start_row: int,
    stop_row: int | None = None,
    data: DataOptions = DataOptions(),
) -> Iterator[tuple[int, dict[str, jax.Array]]]:
    """Yield batches of rows [start_row, stop_row), in order, with the columns of `rows`.

    Args:
        rows: the rows; rows beyond their end are padding, so that a last, smaller batch is not lost.
        shape: (accum, rows_per_micro, seq_len): micro-batches of a batch, rows of a micro-batch over all devices,
            length of a row.
        sharding: sharding of an array of this shape.
        start_row: the first row. A run resumes from this number; the data has no other state.
        stop_row: no batch begins at or after this row; None: batches never end.
        data: reads num_workers and prefetch.

    Yields:
        (the row after the batch, the batch). The batch has each column as an array (accum, rows_per_micro, seq_len), or
        (accum, rows_per_micro, seq_len, width) for a column with a width; columns of patches have the patches of a row
        in place of seq_len, and only their rows are sharded; and `row`, int32 (accum, rows_per_micro), the number of
        each row modulo 2^31. If devices share a row, each with a part of the positions (mesh.context), the positions
        are dealt to them (`deal`).
    """
    import grain  # takes long to import, and most commands read no rows

    size = shape[0] * shape[1]
    needed = needed_rows(sharding, shape)
    row_sharding = _by_row(sharding)
    devices = _devices_of_a_row(sharding)

    def read(first: int) -> dict[tuple[int, int], Row]:
        block = {(i, j): rows[first + i * shape[1] + j] for i, j in needed}
        return block if devices == 1 else {position: deal_row(row, devices) for position, row in block.items()}

    # Grain's threads read blocks ahead and keep their order. Its own checkpoints are not used: a row number is enough.
    first_rows = grain.MapDataset.range(start_row, sys.maxsize if stop_row is None else stop_row, size)
    # A thread makes one block at a time, so more threads than blocks ahead would be idle.
    options = grain.ReadOptions(min(data.num_workers, data.prefetch), data.prefetch)
    for first, block in zip(first_rows, first_rows.map(read).to_iter_dataset(options)):
        names = block[needed[0]]  # every row has the same columns, `place` among them if rows are dealt
        batch = {
            name: _make_column(block, name, shape, row_sharding if name in OF_PATCHES else sharding) for name in names
        }
        # int32, as jax has no int64 by default. Random bits only need rows of a step to have different numbers.
        numbers = ((first + np.arange(size).reshape(shape[:2])) % 2**31).astype(np.int32)
        batch["row"] = jax.make_array_from_callback(numbers.shape, row_sharding, numbers.__getitem__)
        yield first + size, batch


def _by_row(sharding: NamedSharding) -> NamedSharding:
    """Return the sharding of (accum, rows_per_micro, ...) that shards only rows."""
    return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[:2]))


def _devices_of_a_row(sharding: NamedSharding) -> int:
    """Return the number of groups of devices that share a row, each with its own positions in attention."""
    return shards(RULES.value.context, sharding.mesh)


def _make_column(
    block: dict[tuple[int, int], Row], name: str, shape: tuple[int, int, int], sharding: NamedSharding
) -> jax.Array:
    """Return a column of the batch as a sharded array, made of the rows that this process has read."""

    def part(index: Any) -> np.ndarray:
        micro_batches, rows = (range(size)[bounds] for size, bounds in zip(shape, index[:2]))
        # Called for each device: replicas stack the same rows again, but these were read once.
        return np.stack([np.stack([block[i, j][name][index[2]] for j in rows]) for i in micro_batches])

    of_a_row = next(iter(block.values()))[name].shape
    return jax.make_array_from_callback((*shape[:2], *of_a_row), sharding, part)
