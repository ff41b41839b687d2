"""Batches: the right rows in the right order, and only the rows that this process needs."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from tiny import numbered_documents

from jaxtune.columns import LOSS_WEIGHT, NEXT_TOKEN, SEGMENT_IDS, UNIT_IDS, Column
from jaxtune.config.schema import DataOptions
from jaxtune.data.rows.loader import abstract_batch, batches, needed_rows
from jaxtune.data.rows.packed_rows import Rows
from jaxtune.parallel.layout import P, by_token
from jaxtune.parallel.mesh import make_mesh
from jaxtune.parallel.options import MeshOptions

SEQ_LEN = 8
ROWS = Rows(numbered_documents([3, 5, 8, 6, 2] * 6), DataOptions(seq_len=SEQ_LEN), epochs=2)


def one_device():
    return NamedSharding(make_mesh(MeshOptions(), jax.devices()[:1]), P(None, *by_token()))


def test_batches_hold_the_rows_in_order_and_fill_up_with_padding():
    read = list(batches(ROWS, (2, 3, SEQ_LEN), one_device(), 0, ROWS.stop))
    assert [next_row for next_row, _ in read] == [6 * (i + 1) for i in range(-(-ROWS.stop // 6))]
    number = 0
    for _, batch in read:
        assert set(batch) == {*(column.name for column in NEXT_TOKEN), "row"} and batch["row"].shape == (2, 3)
        for i in range(2):
            for j in range(3):
                assert batch["row"][i, j] == number
                for name, values in ROWS[number].items():
                    assert batch[name].dtype == values.dtype
                    assert np.array_equal(batch[name][i, j], values)
                number += 1
    assert not batch["segment_ids"][-1, -1].any()


def test_a_loader_that_starts_in_the_middle_goes_on_as_the_first_would_have():
    whole = dict(batches(ROWS, (1, 4, SEQ_LEN), one_device(), 0, 24))
    for next_row, batch in batches(ROWS, (1, 4, SEQ_LEN), one_device(), 12, 24):
        assert all(np.array_equal(batch[name], whole[next_row][name]) for name in batch)
    # Other batch sizes cut the same rows differently.
    for next_row, batch in batches(ROWS, (2, 2, SEQ_LEN), one_device(), 12, 24):
        assert np.array_equal(np.asarray(batch["tokens"]).reshape(4, SEQ_LEN), whole[next_row]["tokens"][0])


@pytest.mark.parametrize(("workers", "prefetch"), [(0, 4), (1, 1), (8, 2), (2, 0)])
def test_threads_and_batches_ahead_change_no_batch(workers, prefetch):
    whole = list(batches(ROWS, (1, 4, SEQ_LEN), one_device(), 0, 24))
    data = DataOptions(num_workers=workers, prefetch=prefetch)
    requested, ahead = [], []

    class Asked:
        def __getitem__(self, i):
            requested.append(i)
            return ROWS[i]

    for (row, batch), (expected_row, expected) in zip(
        batches(Asked(), (1, 4, SEQ_LEN), one_device(), 0, 24, data), whole, strict=True
    ):
        ahead.append((max(requested) + 1 - row) // 4)
        assert row == expected_row and all(np.array_equal(batch[name], expected[name]) for name in expected)
    assert max(ahead) <= (prefetch if workers else 0)


class _SomeDevices:
    """The part of a sharding that tells a process about its devices."""

    def __init__(self, *indices):
        self.indices = indices

    def addressable_devices_indices_map(self, shape):
        return dict(enumerate(self.indices))


def test_a_process_reads_only_the_rows_its_devices_hold():
    every, first, second = slice(None), slice(0, 2), slice(2, 4)
    shape = (2, 4, SEQ_LEN)
    # rows over two devices, only one on this host
    assert needed_rows(_SomeDevices((every, second, every)), shape) == [(0, 2), (0, 3), (1, 2), (1, 3)]
    # positions over two devices, both on this host: the same rows once
    sequence = _SomeDevices((every, first, slice(0, 4)), (every, first, slice(4, 8)))
    assert needed_rows(sequence, shape) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert len(needed_rows(_SomeDevices((every, first, every), (every, second, every)), shape)) == 8


def test_a_program_can_be_compiled_before_the_first_batch_is_read():
    few = (SEGMENT_IDS, UNIT_IDS, LOSS_WEIGHT)
    for rows, columns in (
        (ROWS, NEXT_TOKEN),
        (Rows(numbered_documents([3, 5]), DataOptions(seq_len=SEQ_LEN), 1, few), few),
    ):
        [(_, batch)] = batches(rows, (2, 3, SEQ_LEN), one_device(), 0, 6)
        abstract = abstract_batch((2, 3, SEQ_LEN), one_device(), columns)
        assert {name: (x.shape, x.dtype, x.sharding) for name, x in batch.items()} == {
            name: (x.shape, x.dtype, x.sharding) for name, x in abstract.items()
        }


def test_row_numbers_wrap_before_int32_does():
    class Far:
        def __getitem__(self, index):
            return ROWS[index % 10]

    [(next_row, batch)] = batches(Far(), (1, 2, SEQ_LEN), one_device(), 2**31 - 1, 2**31)
    assert next_row == 2**31 + 1 and batch["row"].tolist() == [[2**31 - 1, 0]]


@pytest.mark.parametrize(
    "mesh", [MeshOptions(fsdp=2, tensor=2), MeshOptions(fsdp=2, context=2, sequence=2)], ids=["whole", "dealt"]
)
def test_a_column_of_several_numbers_has_an_axis_more(mesh):
    wide = Column("wide", np.float32, width=3)
    values = np.arange(3 * sum(ROWS.documents.lengths), dtype=np.float32).reshape(-1, 3)
    rows = ROWS.with_column(wide, values)
    sharding = NamedSharding(make_mesh(mesh, jax.devices()[: 8 if mesh.context == 2 else 4]), P(None, *by_token()))
    _, batch = next(batches(rows, (2, 2, SEQ_LEN), sharding, 0))
    expected = abstract_batch((2, 2, SEQ_LEN), sharding, (*NEXT_TOKEN, wide))
    assert batch.keys() == expected.keys()
    for name, leaf in expected.items():
        assert (batch[name].shape, batch[name].dtype) == (leaf.shape, leaf.dtype)
        assert batch[name].sharding.is_equivalent_to(leaf.sharding, leaf.ndim)
    columns = {name: np.asarray(array) for name, array in batch.items()}
    for i, j in np.ndindex(2, 2):
        row = rows[2 * i + j]
        place = columns["place"][i, j] if "place" in columns else np.arange(SEQ_LEN)
        assert np.array_equal(columns["wide"][i, j], row["wide"][place]) and row["wide"].any()
