"""The loader: from a row number on, batches as sharded arrays; each process reads only the rows its devices hold."""

from collections.abc import Iterator
from typing import Any

import grain
import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxtune.data.rows import FIELDS, Row, Rows

_THREADS = 4
_BATCHES_AHEAD = 4


def needed_rows(sharding: NamedSharding, shape: tuple[int, int, int]) -> list[tuple[int, int]]:
    """(micro-batch, row) pairs of which this process's devices hold any part, sorted."""
    needed = set()
    indices: Any = sharding.addressable_devices_indices_map(shape)
    for index in indices.values():
        micro_batches, rows = (range(size)[part] for size, part in zip(shape, index[:2]))
        needed.update((i, j) for i in micro_batches for j in rows)
    return sorted(needed)


def abstract_batch(shape: tuple[int, int, int], sharding: NamedSharding) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes, dtypes and shardings of a batch of (accum, rows_per_micro, seq_len), as `batches` gives it."""
    batch = {name: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for name, dtype in FIELDS.items()}
    row_sharding = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[:2]))
    return batch | {"row": jax.ShapeDtypeStruct(shape[:2], np.int32, sharding=row_sharding)}


def batches(
    rows: Rows, accum: int, rows_per_micro: int, seq_len: int, sharding: NamedSharding, start_row: int, stop_row: int
) -> Iterator[tuple[int, dict[str, jax.Array]]]:
    """Batches of rows [start_row, stop_row), in order.

    Args:
        rows: the rows; beyond their end they are padding, so that a last, smaller batch is not lost.
        accum: micro-batches of a batch.
        rows_per_micro: rows of a micro-batch, over all devices.
        seq_len: length of a row.
        sharding: of (accum, rows_per_micro, seq_len).
        start_row: first row, the state of the data.
        stop_row: no batch begins at or after this row.

    Yields:
        The row after the batch, and the fields of `Rows` as (accum, rows_per_micro, seq_len) arrays, with `row`, int32
        (accum, rows_per_micro): the number of each row, modulo 2^31.
    """
    shape = (accum, rows_per_micro, seq_len)
    size = accum * rows_per_micro
    needed = needed_rows(sharding, shape)
    row_sharding = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[:2]))

    def read(first: int) -> dict[tuple[int, int], Row]:
        return {(i, j): rows[first + i * rows_per_micro + j] for i, j in needed}

    firsts = grain.MapDataset.range(start_row, stop_row, size)
    options = grain.ReadOptions(num_threads=_THREADS, prefetch_buffer_size=_BATCHES_AHEAD)
    for first, block in zip(firsts, firsts.map(read).to_iter_dataset(options)):
        batch = {name: _place(block, name, shape, sharding) for name in FIELDS}
        number = (first + np.arange(size).reshape(accum, rows_per_micro)) % 2**31
        batch["row"] = jax.make_array_from_callback(
            number.shape, row_sharding, lambda index, number=number: number[index].astype(np.int32)
        )
        yield first + size, batch


def _place(
    block: dict[tuple[int, int], Row], name: str, shape: tuple[int, int, int], sharding: NamedSharding
) -> jax.Array:
    def part(index: Any) -> np.ndarray:
        micro_batches, rows = (range(size)[part] for size, part in zip(shape, index[:2]))
        return np.stack([np.stack([block[i, j][name][index[2]] for j in rows]) for i in micro_batches])

    return jax.make_array_from_callback(shape, sharding, part)
