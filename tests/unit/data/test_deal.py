"""Rows dealt to devices: every position once, equal work for each device, and `place` to restore the order."""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import numbered_documents

from jaxtune.columns import NEXT_TOKEN
from jaxtune.config.schema import DataOptions
from jaxtune.data.rows.deal import deal_positions, deal_row
from jaxtune.data.rows.loader import abstract_batch, batches
from jaxtune.data.rows.packed_rows import Rows
from jaxtune.parallel.layout import P, by_token
from jaxtune.parallel.mesh import make_mesh
from jaxtune.parallel.options import MeshOptions

LONG = 2**16


def key_start(lengths: list[int], length: int) -> np.ndarray:
    """Return key_start of a row packed with documents of these lengths, cut at `length`; the rest is padding."""
    bounds = np.minimum(np.cumsum([0, *lengths]), length)
    filled = np.repeat(bounds[:-1], np.diff(bounds))
    return np.append(filled, np.full(length - len(filled), length)).astype(np.int32)


def most_over_mean(start: np.ndarray, place: np.ndarray, devices: int) -> float:
    """Return the (query, visible key) pairs of the busiest device, divided by the mean."""
    pairs = np.maximum(np.arange(len(start)) + 1 - start, 0)[place].reshape(devices, -1).sum(axis=1)
    return pairs.max() / pairs.mean()


@given(
    lengths=st.lists(st.integers(1, 40), max_size=12),
    size=st.sampled_from([(2, 1), (2, 12), (3, 8), (4, 40), (8, 3)]),
)
def test_each_device_has_as_many_positions_in_their_order(lengths, size):
    devices, each = size
    place = deal_positions(key_start(lengths, devices * each), devices)
    assert place.dtype == np.int32 and sorted(place) == list(range(devices * each))
    assert (np.diff(place.reshape(devices, -1), axis=1) > 0).all()


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_each_device_has_the_same_work_whatever_is_packed(devices):
    """One document, many of similar lengths, a few long ones, and lengths as in chats."""
    rng = np.random.default_rng(devices)
    packings = [[LONG]]
    packings += [rng.geometric(1 / 4000, 100) for _ in range(5)]
    packings += [rng.integers(100, LONG, 5) for _ in range(5)]
    packings += [np.exp(rng.normal(7, 1.5, 200)).astype(int) + 1 for _ in range(5)]
    starts = [key_start(list(lengths), LONG) for lengths in packings]
    assert max(most_over_mean(start, deal_positions(start, devices), devices) for start in starts) < 1.05
    # Without dealing, the last device has far more.
    assert np.mean([most_over_mean(start, np.arange(LONG), devices) for start in starts]) > 1.15


def test_every_column_follows_and_place_says_where_it_was():
    row = Rows(numbered_documents([3, 5, 8, 6, 2]), DataOptions(seq_len=24), 1)[0]
    columns = deal_row(row, 4)
    assert set(columns) == {*row, "place"} and not np.array_equal(columns["tokens"], row["tokens"])
    for name, column in row.items():
        np.testing.assert_array_equal(column[columns["place"]], columns[name])


def test_the_loader_deals_rows_to_the_devices_of_the_axis_that_keeps_positions():
    rows = Rows(numbered_documents([3, 5, 8, 6, 2] * 4), DataOptions(seq_len=24), epochs=1)
    mesh = make_mesh(MeshOptions(fsdp=1, context=2, sequence=2), jax.devices()[:4])
    sharding, shape = jax.NamedSharding(mesh, P(None, *by_token())), (1, 2, 24)
    [(_, batch)] = batches(rows, shape, sharding, 0, 2)
    abstract = abstract_batch(shape, sharding, NEXT_TOKEN)
    assert {name: (x.shape, x.dtype, x.sharding) for name, x in batch.items()} == {
        name: (x.shape, x.dtype, x.sharding) for name, x in abstract.items()
    }
    for number in range(2):
        for name, column in deal_row(rows[number], 2).items():
            np.testing.assert_array_equal(np.asarray(batch[name])[0, number], column)
