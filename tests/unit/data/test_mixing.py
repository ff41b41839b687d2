"""The share of each dataset in the data."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import byte_tokenizer

from jaxtune.config.schema import Config, DataOptions, Dataset
from jaxtune.data.rows.packed_rows import Rows
from jaxtune.data.rows.splits import open_documents


@pytest.fixture(scope="module")
def open_entries(tmp_path_factory):
    """Return a function that opens entries of these sizes and returns training and validation texts."""
    folder = tmp_path_factory.mktemp("mixing")
    tokenizer = byte_tokenizer(folder / "tokenizer")

    def get(sizes, weights=None, split=0.0, **options):
        entries = []
        for i, size in enumerate(sizes):
            path = folder / f"{i}-{size}.jsonl"
            if not path.exists():
                path.write_text("".join(f'{{"text": "{i}-{k}"}}\n' for k in range(size)))
            entries.append(Dataset(path=str(path), weight=weights and weights[i]))
        data = DataOptions(datasets=tuple(entries), validation_split=split, cache_dir=str(folder / "cache"), **options)
        parts = open_documents(Config(data=data), tokenizer)
        read = [
            [str(tokenizer.decode(part.read(k, 0, 99)[0])).removesuffix("<|im_end|>") for k in range(len(part))]
            for part in (parts[0], *parts[1].values())
        ]
        return (*read, None)[:2], parts[0], data

    return get


def shares(texts) -> list[int]:
    """Return the number of documents from each entry."""
    counts = Counter(int(text.partition("-")[0]) for text in texts)
    return [counts[i] for i in sorted(counts)]


@pytest.mark.parametrize(
    "options, weights, wanted",
    [
        ({}, None, [60, 30, 10]),
        ({"mixing": "interleave_under"}, None, [10, 10, 10]),
        ({"mixing": "interleave_over"}, None, [60, 60, 60]),
        ({"mixing": "interleave_under"}, (3, 2, 1), [30, 20, 10]),
        ({"mixing": "interleave_under"}, (0.1, 0.8, 0.1), [4, 30, 4]),
        ({"mixing": "interleave_over"}, (1, 2, 1), [60, 120, 60]),
        ({"mixing": "interleave_under", "mixing_temperature": 1}, None, [60, 30, 10]),
        ({"mixing": "interleave_over", "mixing_temperature": 2}, None, [60, 42, 24]),
        ({"samples_per_epoch": 20}, None, [12, 6, 2]),
        ({"samples_per_epoch": 333}, None, [200, 100, 33]),
        ({"samples_per_epoch": 31, "mixing": "interleave_over"}, (0.1, 0.8, 0.1), [3, 25, 3]),
    ],
)
def test_datasets_are_in_the_data_in_their_shares(open_entries, options, weights, wanted):
    (texts, _), documents, _ = open_entries((60, 30, 10), weights, **options)
    assert shares(texts) == wanted
    if options:
        drawn = [note.rpartition(": ")[2] for note in documents.notes if "drawn" in note]
        assert drawn == [f"{count} drawn of {size}" for count, size in zip(wanted, (60, 30, 10))]


@pytest.mark.parametrize(("weights", "wanted"), [((None, None), [6, 3]), ((1.0, 1.0), [3, 3])])
def test_validation_data_is_whole_unless_it_has_weights(open_entries, weights, wanted):
    entries = open_entries((6, 3))[2].datasets
    weighted = tuple(replace(entry, weight=weight) for entry, weight in zip(entries, weights))
    (train, validation), _, _ = open_entries((6, 3), mixing="interleave_under", eval_datasets=weighted)
    assert shares(train) == [3, 3] and shares(validation) == wanted


@given(
    sizes=st.lists(st.integers(2, 30), min_size=1, max_size=3),
    weights=st.lists(st.floats(0.1, 10), min_size=3, max_size=3),
    over=st.booleans(),
    shuffle=st.booleans(),
)
@settings(deadline=None, max_examples=40)
def test_one_dataset_is_used_up_and_none_is_repeated_or_all_are(open_entries, sizes, weights, over, shuffle):
    mixing = "interleave_over" if over else "interleave_under"
    (texts, _), *_ = open_entries(sizes, weights, mixing=mixing, shuffle=shuffle)
    counts, kinds = Counter(texts), [f"{i}-{k}" for i, size in enumerate(sizes) for k in range(size)]
    if over:
        assert set(texts) == set(kinds)
        for i in range(len(sizes)):  # no document is repeated twice before all have been used once
            of_one = [count for text, count in counts.items() if text.startswith(f"{i}-")]
            assert max(of_one) - min(of_one) <= 1
    else:
        assert set(counts.values()) == {1} and any(count == size for count, size in zip(shares(texts), sizes))


def test_without_shuffling_datasets_alternate_in_their_own_order(open_entries):
    (texts, _), *_ = open_entries((4, 9), (1, 2), mixing="interleave_under", shuffle=False)
    assert texts == ["1-0", "0-0", "1-1", "1-2", "0-1", "1-3", "1-4", "0-2", "1-5", "1-6", "0-3", "1-7"]


@pytest.mark.parametrize("method", [{"packing": False}, {"packing_method": "sequential"}, {}], ids=str)
def test_datasets_follow_each_other_each_in_a_new_order_every_epoch(open_entries, method):
    """A curriculum: rows of the first dataset, some rows with documents of both, and rows of the second."""
    _, documents, data = open_entries((40, 30), shuffle_each=True, **method)
    rows = Rows(documents, replace(data, seq_len=16), epochs=2)
    epochs = []
    for epoch in range(2):
        of_epoch = [rows[i] for i in range(rows.total(epoch), rows.total(epoch + 1))]
        kinds = [
            {int(row["tokens"][row["segment_ids"] == k][0]) for k in set(row["segment_ids"]) - {0}} for row in of_epoch
        ]
        easy, hard = sorted(set.union(*kinds))  # the first tokens of documents, "0" and "1"
        order = [(hard in kind) + (easy not in kind) for kind in kinds]
        assert [kind == 2 for kind in order] == sorted(kind == 2 for kind in order) and {0, 2} <= set(order)
        assert not method or (order == sorted(order) and order.count(1) <= 1)  # best fit keeps some rows open
        epochs.append([token for row in of_epoch for token in row["tokens"][row["segment_ids"] > 0].tolist()])
    assert epochs[0] != epochs[1] and sorted(epochs[0]) == sorted(epochs[1])


def test_no_document_is_in_training_and_validation(open_entries):
    (training, validation), *_ = open_entries((20, 5), mixing="interleave_over", split=0.2)
    assert len(validation) == 5 and not set(training) & set(validation)
    assert shares(training) == [max(shares(training))] * 2


def test_rows_hold_what_was_drawn_in_every_epoch(open_entries):
    (texts, _), documents, data = open_entries((9, 3), (1, 1), mixing="interleave_over")
    rows = Rows(documents, replace(data, seq_len=16), epochs=2)
    for epoch in range(2):
        per_epoch = rows.total(1)
        tokens = np.concatenate([rows[epoch * per_epoch + i]["tokens"] for i in range(per_epoch)])
        assert np.count_nonzero(tokens) == sum(len(text) + 1 for text in texts)


@pytest.mark.parametrize("options", [{}, {"mixing_temperature": 2}])
def test_a_dataset_that_is_held_out_whole_has_no_share(open_entries, options):
    (training, validation), *_ = open_entries((1, 30), mixing="interleave_over", split=30, **options)
    assert training[0].startswith("1-") and len(training) == 1 and len(set(training + validation)) == 31


def test_a_weight_does_not_tokenise_anew(open_entries):
    _, _, data = open_entries((6, 4), (1, 2), mixing="interleave_under")
    before = set(Path(data.cache_dir).iterdir())
    open_entries((6, 4), (2, 1), mixing="interleave_under")
    assert set(Path(data.cache_dir).iterdir()) == before
