"""Streams: rows of data of unknown length, in order, starting at any row."""

import json
import shutil
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path

import jax
import numpy as np
import pytest
from tiny import byte_tokenizer

from jaxtune.columns import DESIRABLE, LABELLED, NEXT_TOKEN, UNIT_IDS
from jaxtune.config.schema import Config, DataOptions, Dataset, ModelOptions, TrainOptions
from jaxtune.data.rows import streams
from jaxtune.data.rows.feed import open_feed
from jaxtune.data.rows.packed_rows import Rows
from jaxtune.data.rows.splits import open_documents
from jaxtune.data.rows.streams import Stream
from jaxtune.errors import UserError
from jaxtune.objectives.options import PreferenceOptions
from jaxtune.parallel.mesh import make_mesh
from jaxtune.parallel.options import MeshOptions


@pytest.fixture(autouse=True)
def small_windows(monkeypatch):
    monkeypatch.setattr(streams, "_DRAWN_AT_ONCE", 4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Write texts of different lengths in two files, and a tokenizer."""
    folder = tmp_path_factory.mktemp("streams")
    for name, count in (("a", 90), ("b", 35)):
        lines = [json.dumps({"text": f"{name}{i} " * (1 + i * 7 % 5)}) for i in range(count)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder):
    return byte_tokenizer(folder / "tokenizer")


def config_of(folder, names="ab", weights=(None, None), train=None, **data):
    entries = tuple(Dataset(path=str(folder / f"{name}.jsonl"), weight=w) for name, w in zip(names, weights))
    data = {"seq_len": 32, "window_rows": 4, "streaming": True, "cache_dir": str(folder / "cache"), **data}
    return Config(data=DataOptions(datasets=entries, **data), train=train or TrainOptions(max_steps=20))


def texts(stream, tokenizer, count):
    """Return the documents of the first windows as text, in the order they were drawn."""
    decoded = []
    for window in islice(stream.windows(), count):
        documents = window.documents
        decoded += [tokenizer.decode(documents.read(i, 0, 10**6)[0]) for i in range(len(documents))]
    return [str(text).removesuffix("<|im_end|>").strip() for text in decoded]


def feed_of(config, tokenizer, devices=1):
    return open_feed(config, tokenizer, len(tokenizer), make_mesh(MeshOptions(), jax.devices()[:devices]))


def batches(read):
    return [(position, {name: np.asarray(batch[name]).tolist() for name in batch}) for position, batch in read]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mixing": "interleave_over", "weights": (3.0, 1.0), "packing_method": "sequential"},
        {"mixing": "interleave_under", "shuffle": False, "packing": False},
        {"window_rows": 1, "truncation": "right"},
    ],
    ids=str,
)
def test_a_run_that_goes_on_has_the_same_batches_wherever_it_stopped(folder, tokenizer, options):
    config = config_of(folder, **options)
    whole = batches(feed_of(config, tokenizer).batches({}, 30))
    assert [position["row"] for position, _ in whole] == list(range(1, 31))
    assert whole[-1][0]["stream"]["window"] >= 2
    for done in (1, 7, 13, 22, 29):
        position = json.loads(json.dumps(whole[done - 1][0]))
        assert batches(feed_of(config, tokenizer).batches(position, 30 - done)) == whole[done:]


def test_the_rows_are_the_same_on_other_devices_and_with_other_threads(folder, tokenizer):
    def rows(devices, rows, steps, **options):
        config = config_of(folder, train=TrainOptions(max_steps=steps, micro_batch_size=rows), **options)
        read = batches(feed_of(config, tokenizer, devices).batches({}, steps))
        return [row for _, batch in read for row in batch["tokens"][0]], read[-1][0]

    assert rows(1, 8, 5) == rows(4, 2, 5) == rows(2, 2, 10) == rows(1, 4, 10, num_workers=0)


KINDS = {
    "text": (lambda i: {"text": f"text {i}"}, PreferenceOptions(), NEXT_TOKEN),
    "pairs": (
        lambda i: {"prompt": f"{i}?", "chosen": f"yes {i}", "rejected": "no"},
        PreferenceOptions(loss="sigmoid"),
        (*NEXT_TOKEN, UNIT_IDS),
    ),
    "answers": (
        lambda i: {"prompt": f"{i}?", "completion": f"yes {i}", "label": i % 3 > 0},
        PreferenceOptions(loss="kto"),
        (*NEXT_TOKEN, UNIT_IDS, DESIRABLE),
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_window_is_what_rows_make_of_its_documents(tokenizer, tmp_path, monkeypatch, kind):
    """If one window holds all data, the rows are the same as without streaming."""
    monkeypatch.setattr(streams, "_DRAWN_AT_ONCE", 64)
    sample, preference, columns = KINDS[kind]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(sample(i)) for i in range(64)))
    config = replace(config_of(tmp_path, names="a", window_rows=1, seq_len=160), preference=preference)
    window = next(Stream(config, tokenizer, columns=columns).windows())
    documents, _ = open_documents(replace(config, data=replace(config.data, streaming=False)), tokenizer)
    expected = Rows(documents, config.data, 1, columns)
    assert window.rows.counts == expected.counts and window.stop == expected.stop
    for i in range(expected.stop):
        for name, values in expected[i].items():
            assert np.array_equal(window.rows[i][name], values), name


def test_datasets_follow_each_other_or_alternate_in_their_shares_and_begin_again(folder, tokenizer):
    a, b = (
        [json.loads(line)["text"].strip() for line in (folder / f"{name}.jsonl").read_text().splitlines()]
        for name in "ab"
    )
    follow = texts(Stream(config_of(folder), tokenizer), tokenizer, 20)
    assert len(follow) > 150 and follow == list(islice(cycle(a + b), len(follow)))

    stream = Stream(config_of(folder, mixing="interleave_over", weights=(1.0, 3.0)), tokenizer)
    over = texts(stream, tokenizer, 12)
    assert [text[0] for text in over[:8]] == list("babbbabb")
    of_b = [text for text in over if text[0] == "b"]
    assert len(of_b) > 50 and of_b == list(islice(cycle(b), len(of_b)))

    stream = Stream(config_of(folder, mixing="interleave_under"), tokenizer)
    of_a = [text for text in texts(stream, tokenizer, 12) if text[0] == "a"]
    assert of_a[:38] == [*a[:36], *a[:2]]  # b has 35 texts and has ended


def test_position_says_how_often_the_data_was_read(folder, tokenizer):
    feed = feed_of(config_of(folder, names="b"), tokenizer)
    positions = [position for position, _ in feed.batches({}, 60)]
    epochs = [feed.epoch(position) for position in positions]
    assert feed.epoch({}) == epochs[0] == 0 and epochs == sorted(epochs) and epochs[-1] >= 2


def test_a_bad_sample_ends_the_stream_or_is_left_out_and_counted(folder, tokenizer, tmp_path, caplog):
    lines = (folder / "b.jsonl").read_text().splitlines()
    (tmp_path / "b.jsonl").write_text("\n".join([*lines[:5], "{", *lines[5:]]))
    bad = config_of(tmp_path, names="b", cache_dir=None)
    with pytest.raises(UserError, match=r"b.jsonl:6: not JSON.*on_bad_row='skip' leaves such samples out"):
        list(feed_of(bad, tokenizer).batches({}, 3))
    skipping = replace(bad, data=replace(bad.data, on_bad_row="skip"))
    read = texts(Stream(skipping, tokenizer), tokenizer, 2)
    good = texts(Stream(config_of(folder, names="b"), tokenizer), tokenizer, 3)
    assert read == good[: len(read)] and len(read) > 10 and "bad samples skipped until row" in caplog.text
    assert Stream(skipping, tokenizer).has_key(Stream(bad, tokenizer).key), "the run that it ended can continue"


def test_documents_that_are_longer_than_a_row_are_counted(folder, tokenizer, caplog):
    caplog.set_level("INFO", logger="jaxtune")
    stream = Stream(config_of(folder, names="a", seq_len=12, truncation="delete", window_rows=2), tokenizer)
    first, second = islice(stream.windows(), 2)
    lost = [window.rows.counts.dropped_documents for window in (first, second)]
    assert all(lost) and second.after["dropped"] == sum(lost)
    assert f"{sum(lost)} documents longer than a row left out until row {second.stop}" in caplog.text
    assert caplog.text.count(" documents are left out: they are longer than data.seq_len=12") == 1
    (again,) = islice(stream.windows(second.place), 1)
    assert again.after == second.after


def test_a_stream_without_a_sample_says_so(tokenizer, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n')
    with pytest.raises(UserError, match="no sample of the stream can be trained on"):
        next(Stream(config_of(tmp_path, names="a", on_bad_row="skip"), tokenizer).windows())


def test_a_classifier_learns_from_a_stream(tokenizer, tmp_path):
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": f"t{i}", "label": i % 2}) for i in range(9)))
    entry = Dataset(path=str(tmp_path / "a.jsonl"), type="classification")
    data = DataOptions(datasets=(entry,), seq_len=16, window_rows=2, streaming=True)
    config = Config(ModelOptions(head="classification", id2label=("x", "y")), data, train=TrainOptions(max_steps=2))
    window = next(Stream(config, tokenizer, columns=LABELLED).windows())
    row = window.rows[0]
    assert row["last"].sum() >= 2 and set(row["label"][row["last"]]) <= {0, 1} and set(row["label"]) == {0, 1}


def test_the_cache_holds_nothing_of_a_stream(folder, tokenizer, tmp_path):
    config = config_of(folder, cache_dir=str(tmp_path / "none"))
    feed = feed_of(config, tokenizer)
    list(feed.batches({}, 3))
    assert not Path(config.data.cache_dir or "").exists() and not feed.eval_rows
    single = replace(config, data=replace(config.data, datasets=config.data.datasets[:1]))
    assert feed.documents.has_key(feed_of(config, tokenizer).documents.key)
    assert not feed.documents.has_key(feed_of(single, tokenizer).documents.key)


def test_copies_of_the_files_of_a_stream_are_the_same_data(folder, tokenizer, tmp_path):
    """On another host, or after a restore, files have another time and perhaps another path."""
    for name in "ab":
        shutil.copyfile(folder / f"{name}.jsonl", tmp_path / f"{name}.jsonl")
    here, there = (Stream(config_of(home), tokenizer) for home in (folder, tmp_path))
    assert here.content_key == there.content_key and not here.has_key(there.key)
    text = (tmp_path / "b.jsonl").read_text()
    (tmp_path / "b.jsonl").write_text(text.replace("b34", "c34"))
    assert Stream(config_of(tmp_path), tokenizer).content_key != here.content_key
