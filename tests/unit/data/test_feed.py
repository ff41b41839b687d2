"""A feed goes on from where its position says, whatever wrote the position down."""

import json
from itertools import islice

import jax
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from tiny import numbered_documents

from jaxtune.config.schema import Data, Mesh
from jaxtune.data.feed import Feed
from jaxtune.data.rows import Rows
from jaxtune.parallel.layout import P, by_token
from jaxtune.parallel.mesh import make_mesh

SEQ_LEN = 8
DOCUMENTS = numbered_documents([3, 5, 8, 6, 2] * 3)


def feed(epochs):
    rows = Rows(DOCUMENTS, Data(seq_len=SEQ_LEN), epochs)
    sharding = NamedSharding(make_mesh(Mesh(), jax.devices()[:1]), P(None, *by_token()))
    return Feed(DOCUMENTS, rows, None, (1, 2, SEQ_LEN), sharding, total_steps=12, chat=False)


def tokens(found):
    return [(position, np.asarray(batch["tokens"]).tolist()) for position, batch in found]


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
    found = tokens(islice(endless.batches(position), 3))
    assert [place["row"] - position["row"] for place, _ in found] == [2, 4, 6]
    assert all(np.any(batch) for _, batch in found)
