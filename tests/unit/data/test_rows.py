"""The content of a row, and the order of rows."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import ORDERS, numbered_documents

from jaxtune.columns import LABELLED, NEXT_TOKEN, Column, further_columns
from jaxtune.config.schema import DataOptions
from jaxtune.data.formats.units import Documents
from jaxtune.data.rows.packed_rows import Rows
from jaxtune.data.rows.splits import hold_out
from jaxtune.errors import UserError

SEQ_LEN = 16


@given(
    lengths=st.lists(st.integers(2, 3 * SEQ_LEN), min_size=1, max_size=20),
    order=st.sampled_from(
        [*ORDERS, {"packing": False}, {"packing": False, "shuffle": False}, {"shuffle": False}],
    ),
    truncation=st.sampled_from(["split", "left", "right"]),
)
@settings(deadline=None)
def test_every_target_is_trained_once_an_epoch_after_its_own_document(lengths, order, truncation):
    documents = numbered_documents(lengths)
    data, columns = DataOptions(seq_len=SEQ_LEN, truncation=truncation, **order), (*NEXT_TOKEN, *further_columns(2))
    rows = Rows(documents, data, epochs=1, columns=columns, rows_per_step=4)
    seen = Counter()
    last = {int(offset) for offset in documents.parts[0].offsets[1:]}  # tokens are numbered from 1
    for i in range(rows.stop):
        row = rows[i]
        trained = row["loss_weight"] > 0
        seen.update(row["targets"][trained].tolist())
        assert (row["targets"] - row["tokens"] == 1)[trained].all()
        assert not trained[row["segment_ids"] == 0].any()
        for module in range(2):
            # The token after the next one, or further, of the same document, unless it has ended before.
            ahead = np.where(trained, row["targets"] + module + 1, 0)
            within = [all(int(token) - back not in last for back in range(1, module + 2)) for token in ahead]
            ahead = np.where(within, ahead, 0)
            assert np.array_equal(row["further_targets"][:, module], ahead)
            assert np.array_equal(row["further_loss_weight"][:, module], ahead > 0)
    offsets = documents.parts[0].offsets
    starts = set((offsets[:-1] + 1).tolist())
    expected = {
        token
        for begin, length in zip(offsets, lengths)
        for token in range(
            begin + 2 + (max(0, length - SEQ_LEN) if truncation == "left" else 0),
            begin + 1 + (min(length, SEQ_LEN + 1) if truncation == "right" else length),
        )
    }
    assert seen == Counter(expected) and not starts & set(seen)


@given(
    lengths=st.tuples(*[st.lists(st.integers(2, 3 * SEQ_LEN), min_size=2, max_size=10)] * 2),
    order=st.sampled_from([*ORDERS, {"packing": False}]),
    truncation=st.sampled_from(["split", "left", "right"]),
    held_out=st.sampled_from([None, 1]),
)
@settings(deadline=None)
def test_values_of_several_numbers_stand_where_their_token_is_the_target(lengths, order, truncation, held_out):
    """In each part of a document and in every epoch; values of documents that were held out are stored but not read."""
    first, second = (numbered_documents(each).parts[0] for each in lengths)
    count = len(first.values["tokens"])
    second = replace(second, values=second.values | {"tokens": second.values["tokens"] + count})
    documents = Documents.concatenate([first, second])
    documents = documents if held_out is None else hold_out(documents, held_out, seed=1)[0]
    numbers = np.arange(count + len(second.values["tokens"]), dtype=np.int32)
    column = Column("wide", np.int32, width=2, padding=-1)
    rows = Rows(documents, DataOptions(seq_len=SEQ_LEN, truncation=truncation, **order), epochs=2, rows_per_step=4)
    rows = rows.with_column(column, np.stack([numbers, -numbers], axis=1))
    for i in range(rows.stop + 1):
        row, expected = rows[i], np.full(SEQ_LEN, -1)
        trained = row["loss_weight"] > 0
        assert row["wide"].shape == (SEQ_LEN, 2) and row["wide"].dtype == np.int32
        assert np.array_equal(row["wide"][trained], np.stack([row["targets"] - 1, 1 - row["targets"]], axis=1)[trained])
        assert (row["wide"][~trained] == -1).all()
        for document, start, position, size in rows.targets_in(i):
            expected[position : position + size] = rows.documents.first_token[document] + start + np.arange(size)
        assert np.array_equal(expected, row["wide"][:, 0])


def test_positions_segments_and_visible_keys_restart_with_each_document():
    row = Rows(numbered_documents([3, 5, 4]), DataOptions(seq_len=SEQ_LEN, shuffle=False))[0]
    assert row["tokens"].tolist() == [*range(1, 13), 0, 0, 0, 0]
    assert row["positions"].tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 0, 0, 0]
    assert row["segment_ids"].tolist() == [1, 1, 1, 2, 2, 2, 2, 2, 3, 3, 3, 3, 0, 0, 0, 0]
    assert row["key_start"].tolist() == [0, 0, 0, 3, 3, 3, 3, 3, 8, 8, 8, 8, 16, 16, 16, 16]
    assert row["loss_weight"].tolist() == [1, 1, 0, 1, 1, 1, 1, 0, 1, 1, 1, 0, 0, 0, 0, 0]
    assert {name: values.dtype.name for name, values in row.items()} == {
        **dict.fromkeys(("tokens", "targets", "positions", "segment_ids", "key_start"), "int32"),
        "loss_weight": "float32",
    }


def test_weights_belong_to_the_target():
    """A prompt of two tokens and an answer of two: the prompt's last token predicts the answer's first."""
    row = Rows(numbered_documents([4], [[0, 0, 1, 0.5]]), DataOptions(seq_len=6))[0]
    assert row["loss_weight"].tolist() == [0, 1, 0.5, 0, 0, 0]


def test_rows_go_on_through_the_epochs_in_a_new_order_and_end_in_padding():
    data = DataOptions(seq_len=SEQ_LEN)
    rows = Rows(numbered_documents([9] * 10), data, epochs=2.5)
    assert rows.stop == rows.total(2.5) == 25 and rows.total(2) == 20
    tokens = [rows[i]["tokens"] for i in range(25)]
    first, second = tokens[:10], tokens[10:20]
    assert sorted(map(tuple, first)) == sorted(map(tuple, second))
    assert not np.array_equal(first, second)
    beyond = rows[25]
    assert not beyond["segment_ids"].any() and not beyond["loss_weight"].any()
    assert beyond["key_start"].tolist() == [SEQ_LEN] * SEQ_LEN
    endless = Rows(numbered_documents([9] * 10), data)
    assert endless.stop is None and endless[1000]["segment_ids"].any()
    assert np.array_equal(endless[17]["tokens"], tokens[17])


def test_a_row_with_more_documents_than_the_kernel_takes_is_refused():
    """Two documents that are split, whose parts count each, and six of 2 tokens in the rest of their rows."""
    documents, data = numbered_documents([20, 20, *[2] * 6]), DataOptions(seq_len=SEQ_LEN)
    rows = Rows(documents, data, epochs=2)
    fullest = max(int(rows[i]["segment_ids"].max()) for i in range(rows.stop))
    assert fullest > 2 and Rows(documents, data, epochs=2, max_documents_per_row=fullest).stop == rows.stop
    with pytest.raises(UserError, match=f"documents_per_row={fullest - 1}: .* holds {fullest} documents.*set it to"):
        Rows(documents, data, epochs=2, max_documents_per_row=fullest - 1)


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_rows_are_random_access(order):
    """The data's state is one number: any row can be read first, in any epoch."""
    documents, data = numbered_documents([3, 5, 7, 9, 11, 2, 4] * 5), DataOptions(seq_len=SEQ_LEN, **order)
    in_order = Rows(documents, data, rows_per_step=4)
    in_order = [in_order[i] for i in range(80)]
    for i in (79, 3, 45, 0):
        fresh = Rows(documents, data, rows_per_step=4)[i]
        assert all(np.array_equal(fresh[name], in_order[i][name]) for name in fresh)


def test_counts_tell_what_was_cut_and_dropped():
    lengths = [4, 20, 16, 40]
    split = Rows(numbered_documents(lengths), DataOptions(seq_len=SEQ_LEN)).counts
    assert (split.documents, split.tokens, split.split_documents, split.dropped_documents) == (4, 80, 2, 0)
    deleted = Rows(numbered_documents(lengths, continuous=False), DataOptions(seq_len=SEQ_LEN)).counts
    assert (deleted.documents, deleted.tokens, deleted.dropped_documents, deleted.dropped_tokens) == (2, 20, 2, 60)
    assert deleted.target_tokens == 3 + 15
    cut = Rows(numbered_documents(lengths), DataOptions(seq_len=SEQ_LEN, truncation="right")).counts
    assert (cut.documents, cut.tokens, cut.truncated_documents, cut.truncated_tokens) == (4, 52, 2, 28)
    assert cut.rows == 4 and cut.fill == 52 / 64
    assert "2 truncated by 28 tokens" in str(cut)


def test_a_cut_that_leaves_no_target_drops_the_document():
    answer_at_the_end = [0] * 20 + [1] * 4
    documents = numbered_documents([24, 6], [answer_at_the_end, [1] * 6], continuous=False)
    counts = Rows(documents, DataOptions(seq_len=SEQ_LEN, truncation="right")).counts
    assert (counts.documents, counts.dropped_documents, counts.dropped_tokens, counts.target_tokens) == (1, 1, 24, 5)
    counts = Rows(documents, DataOptions(seq_len=SEQ_LEN, truncation="left")).counts
    assert (counts.documents, counts.truncated_tokens, counts.target_tokens) == (2, 8, 4 + 5)


def test_nothing_left_is_an_error_that_says_what_to_do():
    with pytest.raises(UserError, match="seq_len=16"):
        Rows(numbered_documents([20, 30], continuous=False), DataOptions(seq_len=SEQ_LEN))


@given(count=st.integers(2, 40), fraction=st.floats(0.001, 0.999), seed=st.integers(0, 2**31))
@settings(deadline=None)
def test_validation_documents_are_apart_from_training_and_the_same_each_time(count, fraction, seed):
    documents = numbered_documents([3] * count)
    train, validation = hold_out(documents, fraction, seed)
    assert len(train) >= 1 and len(validation) >= 1
    assert sorted([*train.chosen, *validation.chosen]) == list(range(count))
    assert np.array_equal(hold_out(documents, fraction, seed)[1].chosen, validation.chosen)


def test_rows_of_a_part_of_the_documents_hold_only_those():
    train, validation = hold_out(numbered_documents([5] * 20), 0.3, seed=1)
    tokens = []
    for part in (train, validation):
        rows = Rows(part, replace(DataOptions(seq_len=SEQ_LEN), shuffle=False), epochs=1)
        tokens.append({token for i in range(rows.stop) for token in rows[i]["tokens"].tolist() if token})
    assert not tokens[0] & tokens[1] and tokens[0] | tokens[1] == set(range(1, 101))
    with pytest.raises(UserError, match="only one document"):
        hold_out(numbered_documents([5]), 0.1, seed=1)


def test_a_document_with_a_label_is_cut_and_never_split_and_its_last_token_is_known():
    label = Column("label", np.float32, "document")
    documents = numbered_documents([3, 2 * SEQ_LEN, 1], weights=[np.zeros(n) for n in (3, 2 * SEQ_LEN, 1)])
    (part,) = documents.parts
    values = {**part.values, "label": np.array([2, 0, 1], np.float32)}
    documents = Documents.concatenate([replace(part, columns={**part.columns, "label": label}, values=values)])
    rows = Rows(documents, DataOptions(seq_len=SEQ_LEN, shuffle=False), 1, LABELLED)
    by_first_token = {rows[i]["tokens"][0]: rows[i] for i in range(rows.stop)}
    assert np.flatnonzero(by_first_token[1]["last"]).tolist() == [2, 3]
    assert by_first_token[1]["label"][:5].tolist() == [2, 2, 2, 1, 0]
    assert np.flatnonzero(by_first_token[4]["last"]).tolist() == [SEQ_LEN - 1]
    assert (rows.counts.documents, rows.counts.truncated_documents, rows.counts.truncated_tokens) == (3, 1, SEQ_LEN)
    assert "20 tokens in 2 rows" in str(rows.counts)
    at_the_left = Rows(documents, DataOptions(seq_len=SEQ_LEN, truncation="left", shuffle=False), 1, LABELLED)
    (end,) = (row for row in (at_the_left[0], at_the_left[1]) if row["last"][-1])
    assert end["tokens"].tolist() == list(range(4 + SEQ_LEN, 4 + 2 * SEQ_LEN)) and not end["label"].any()
    uncut = Rows(documents, DataOptions(seq_len=SEQ_LEN, truncation="delete"), 1, LABELLED)
    assert (uncut.counts.documents, uncut.counts.dropped_documents) == (2, 1)
    with pytest.raises(UserError, match=r"numbers has no column 'label' with a value for each document"):
        Rows(numbered_documents([3]), DataOptions(seq_len=SEQ_LEN), 1, LABELLED)
