"""A feed continues from its saved position, whatever wrote the position."""

import json
from itertools import islice

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from tiny import ORDERS, numbered_documents

from jaxtune.config.schema import Config, DataOptions, TrainOptions
from jaxtune.data.rows import feed as feeds
from jaxtune.data.rows.feed import Feed, open_feed
from jaxtune.data.rows.packed_rows import Rows
from jaxtune.errors import UserError
from jaxtune.parallel.layout import P, by_token
from jaxtune.parallel.mesh import make_mesh
from jaxtune.parallel.options import MeshOptions

SEQ_LEN = 8
DOCUMENTS = numbered_documents([3, 5, 8, 6, 2] * 3)


def feed(epochs):
    rows = Rows(DOCUMENTS, DataOptions(seq_len=SEQ_LEN), epochs)
    sharding = NamedSharding(make_mesh(MeshOptions(), jax.devices()[:1]), P(None, *by_token()))
    return Feed(DOCUMENTS, rows, None, (1, 2, SEQ_LEN), sharding, total_steps=12, chat=False)


def tokens(batches):
    return [(position, np.asarray(batch["tokens"]).tolist()) for position, batch in batches]


WHOLE = tokens(feed(epochs=2).batches({}))
STEPS = len(WHOLE)
ENDLESS = tokens(feed(epochs=None).batches({}, STEPS))


@given(done=st.integers(0, STEPS - 1), ends=st.booleans())
@settings(deadline=None, max_examples=10)
def test_a_position_that_was_json_gives_the_batches_that_follow(done, ends):
    whole = WHOLE if ends else ENDLESS
    position = json.loads(json.dumps(whole[done - 1][0] if done else {}))
    assert tokens(feed(2 if ends else None).batches(position, STEPS - done)) == whole[done:]


def test_a_feed_ends_with_its_rows_or_never():
    ends, endless = feed(epochs=2), feed(epochs=None)
    assert -(-ends.rows.stop // 2) == STEPS and ends.epoch(WHOLE[-1][0]) >= 2 and ends.epoch({}) == 0
    position = {"row": 50 * endless.rows.counts.rows}
    rows = tokens(islice(endless.batches(position), 3))
    assert [place["row"] - position["row"] for place, _ in rows] == [2, 4, 6]
    assert all(np.any(batch) for _, batch in rows)


def test_the_last_step_is_filled_up_with_padding_or_left_out(monkeypatch, caplog):
    monkeypatch.setattr(feeds, "open_documents", lambda *_: (DOCUMENTS, {}))
    mesh = make_mesh(MeshOptions(), jax.devices()[:1])

    def opened(drop_last, **train):
        data = DataOptions(seq_len=SEQ_LEN, packing=False, drop_last=drop_last)
        return open_feed(Config(data=data, train=TrainOptions(epochs=1.4, **train)), None, 0, mesh)

    with caplog.at_level("INFO", "jaxtune"):
        whole, dropped = opened(False, grad_accum_steps=4), opened(True, grad_accum_steps=4)
    assert whole.rows.stop == 21 and (whole.total_steps, dropped.total_steps) == (6, 5)
    assert caplog.text.count("leaves out 1 row of the last epoch") == 1
    positions, batches = zip(*whole.batches({}, whole.total_steps))
    assert whole.epoch(positions[-1]) == pytest.approx(1.4)
    padding = [(np.asarray(batch["segment_ids"]) == 0).all(-1).sum() for batch in batches]
    assert padding == [0, 0, 0, 0, 0, 3] and len(list(dropped.batches({}, dropped.total_steps))) == 5
    with pytest.raises(UserError, match="drop_last: a step is 30 rows, and there are only 21"):
        opened(True, grad_accum_steps=30)


def test_rows_of_a_step_have_like_lengths_wherever_the_run_goes_on(monkeypatch):
    monkeypatch.setattr(feeds, "open_documents", lambda *_: (DOCUMENTS, {}))
    data = DataOptions(seq_len=SEQ_LEN, packing=False, group_by_length=True)
    config = Config(data=data, train=TrainOptions(epochs=2, grad_accum_steps=3))
    mesh = make_mesh(MeshOptions(), jax.devices()[:1])
    batches = list(open_feed(config, None, 0, mesh).batches({}, 10))
    lengths = [np.count_nonzero(batch["segment_ids"], -1).ravel().tolist() for _, batch in batches]
    assert sorted(lengths[:5]) == sorted(lengths[5:]) == [[n] * 3 for n in (2, 3, 5, 6, 8)]
    assert lengths[:5] != lengths[5:]
    assert tokens(open_feed(config, None, 0, mesh).batches(batches[6][0], 3)) == tokens(batches[7:])


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_a_run_goes_on_with_the_same_rows_on_other_devices(monkeypatch, order):
    monkeypatch.setattr(feeds, "open_documents", lambda *_: (DOCUMENTS, {}))
    data = DataOptions(seq_len=SEQ_LEN, **order)

    def opened(devices, rows):
        config = Config(data=data, train=TrainOptions(epochs=3, micro_batch_size=rows))
        return open_feed(config, None, 0, make_mesh(MeshOptions(data=devices, fsdp=1), jax.devices()[:devices]))

    one, two = opened(1, 2), opened(2, 1)
    whole = tokens(one.batches({}, one.total_steps))
    assert one.total_steps == two.total_steps > 6
    assert whole[5:] == tokens(two.batches(whole[4][0], two.total_steps - 5))
