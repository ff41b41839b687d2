"""Units: packed whole and held out whole, with any columns stored for them."""

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import numbered_documents

from jaxtune.columns import KEY_START, LOSS_WEIGHT, SEGMENT_IDS, TOKENS, UNIT_IDS, Column
from jaxtune.config.schema import DataOptions
from jaxtune.data.cache import token_cache
from jaxtune.data.chat.encoding import Encoded
from jaxtune.data.formats.units import Documents, Unit
from jaxtune.data.rows.packed_rows import Rows
from jaxtune.data.rows.splits import hold_out
from jaxtune.errors import UserError

SEQ_LEN = 16
UNITS = st.lists(st.lists(st.integers(2, 9), min_size=1, max_size=3), min_size=2, max_size=15)


def documents_of(units):
    """Return documents of these lengths, units[i] for unit i, and the tokens of each unit's documents."""
    lengths = [length for unit in units for length in unit]
    documents = numbered_documents(lengths, continuous=False, sizes=list(map(len, units)))
    ends = np.cumsum(lengths)
    tokens = iter([list(range(end - length + 1, end + 1)) for end, length in zip(ends, lengths)])
    return documents, [[next(tokens) for _ in unit] for unit in units]


def units_in(rows: Rows) -> list[list[list[int]]]:
    """Return the tokens of the documents of each unit of each row."""
    units = []
    for i in range(rows.stop):
        row = rows[i]
        for unit in range(1, row["unit_ids"].max(initial=0) + 1):
            in_unit = row["unit_ids"] == unit
            segments = row["segment_ids"][in_unit]
            assert (np.diff(np.flatnonzero(in_unit)) == 1).all() and (np.diff(segments) >= 0).all()
            units.append([row["tokens"][in_unit][segments == segment].tolist() for segment in np.unique(segments)])
    return units


@given(units=UNITS, packing=st.booleans(), shuffle=st.booleans(), fraction=st.sampled_from([None, 0.2, 0.7]))
@settings(deadline=None)
def test_a_unit_stands_whole_in_one_row_on_one_side(units, packing, shuffle, fraction):
    documents, tokens = documents_of([*units, [2, 3]])
    fits = [unit for unit in tokens if sum(map(len, unit)) <= SEQ_LEN]
    data = DataOptions(seq_len=SEQ_LEN, packing=packing, shuffle=shuffle)
    seen = []
    for part in hold_out(documents, fraction, seed=1) if fraction else [documents]:
        numbers = [tokens[i] for i in part.chosen]
        assert part.lengths.tolist() == [len(document) for unit in numbers for document in unit]
        if any(unit in fits for unit in numbers):
            rows = Rows(part, data, 1, (TOKENS, SEGMENT_IDS, UNIT_IDS, KEY_START))
            of_rows = units_in(rows)
            assert sorted(of_rows) == [unit for unit in numbers if unit in fits]
            assert rows.counts.dropped_documents == sum(len(unit) for unit in numbers if unit not in fits)
            assert packing or len(of_rows) == rows.stop
            seen += of_rows
    assert sorted(seen) == fits


def test_a_unit_that_would_have_to_be_cut_is_an_error_that_says_what_to_choose():
    documents, _ = documents_of([[9, 9], [3, 4]])
    for truncation in ("left", "right", "split"):
        with pytest.raises(UserError, match=f"truncation='{truncation}' would cut documents that belong together"):
            Rows(documents, DataOptions(seq_len=SEQ_LEN, truncation=truncation))
    rows = Rows(documents, DataOptions(seq_len=SEQ_LEN, truncation="delete"), epochs=1)
    assert (rows.counts.documents, rows.counts.dropped_documents, rows.stop) == (2, 2, 1)


COLUMNS = (
    Column("advantage", np.float32, "token", -1),
    Column("label", np.int8, "document", 9),
    Column("margin", np.float32, "unit"),
)


def store(folder):
    """Store two units, the first with two documents, with values of each column by token, document or unit."""
    folder.mkdir()
    document = lambda *tokens: Encoded(np.array(tokens, np.int32), np.array([0, 0, 1][: len(tokens)], np.float16))  # noqa: E731
    values = [
        {"advantage": [[0.0, 0.1, 0.2], [0.3, 0.4, 0.5]], "label": [1, 0], "margin": 0.5},
        {"advantage": [[0.6, 0.7, 0.8]], "label": [1], "margin": 2.0},
    ]
    documents = (document(1, 2, 3), document(4, 5, 6)), (document(7, 8, 9),)
    units = [Unit(pair, values=of) for pair, of in zip(documents, values)]
    token_cache.finish(folder, token_cache.write(folder, units, COLUMNS), "pairs")
    return token_cache.load(folder)


def test_columns_are_stored_and_stand_where_they_belong(tmp_path):
    two_parts = Documents.concatenate([store(tmp_path / "a"), store(tmp_path / "b")])
    assert two_parts.units.tolist() == [0, 2, 3, 5, 6] and two_parts.lengths.tolist() == [3] * 6
    _, half = hold_out(two_parts, 0.5, seed=0)
    for documents, rows_wanted in ((two_parts, 4), (half, 2)):
        rows = Rows(documents, DataOptions(seq_len=8, packing=False), 1, (TOKENS, LOSS_WEIGHT, *COLUMNS))
        assert rows.stop == rows_wanted
        for i in range(rows.stop):
            row = {name: values.tolist() for name, values in rows[i].items()}
            pair = row["tokens"][0] == 1
            assert row["tokens"] == ([1, 2, 3, 4, 5, 6, 0, 0] if pair else [7, 8, 9, 0, 0, 0, 0, 0])
            assert row["loss_weight"] == [0, 1, 0] * (1 + pair) + [0] * (5 - 3 * pair)
            advantages = [0.1, 0.2, -1, 0.4, 0.5, -1, -1, -1] if pair else [0.7, 0.8, -1, -1, -1, -1, -1, -1]
            assert np.allclose(row["advantage"], advantages)
            assert row["label"] == ([1, 1, 1, 0, 0, 0, 9, 9] if pair else [1, 1, 1, 9, 9, 9, 9, 9])
            assert row["margin"] == ([0.5] * 6 + [0, 0] if pair else [2, 2, 2, 0, 0, 0, 0, 0])


def test_a_column_that_is_not_stored_is_named():
    documents, _ = documents_of([[2], [3]])
    with pytest.raises(UserError, match="numbers has no column 'label' with a value for each document"):
        Rows(documents, DataOptions(seq_len=SEQ_LEN), columns=(TOKENS, COLUMNS[1]))


def test_a_column_of_another_length_is_not_written(tmp_path):
    unit = Unit((Encoded(np.array([1, 2], np.int32), np.ones(2, np.float16)),), values={"label": [1, 0]})
    with pytest.raises(ValueError, match="label: 2 values for 1"):
        token_cache.write(tmp_path, [unit], (COLUMNS[1],))


def test_the_key_tells_units_and_columns_apart_and_an_old_one_is_known(tmp_path):
    """Checkpoints written while one folder held all entries have one hash over all."""
    documents = [Encoded(np.arange(n, dtype=np.int32), np.ones(n, np.float16)) for n in (3, 4, 5)]
    alone, pairs = [Unit((document,)) for document in documents], [Unit(tuple(documents[:2])), Unit((documents[2],))]
    parts = {}
    for name, units in {"alone": alone, "pairs": pairs}.items():
        (tmp_path / name).mkdir()
        token_cache.finish(tmp_path / name, token_cache.write(tmp_path / name, units), name)
        parts[name] = token_cache.load(tmp_path / name)
    before = hashlib.sha256()
    for document in documents * 2:
        before.update(document.tokens.tobytes() + document.loss_weights.tobytes())
    before.update(np.array([3, 4, 5] * 2, np.int64).tobytes())

    one, two = Documents.concatenate([parts["alone"]]), Documents.concatenate([parts["alone"]] * 2)
    keys = {one.key, two.key, Documents.concatenate([parts["pairs"]]).key, before.hexdigest()}
    assert len(keys) == 4
    assert two.has_key(two.key) and two.has_key(before.hexdigest()) and not two.has_key(one.key)
    assert one.has_key(one.key) and not one.has_key(before.hexdigest())
