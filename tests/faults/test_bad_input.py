"""A bad sample raises an error that names file and line, or is left out and counted."""

import gzip
import itertools
import json
import logging
import re

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from tiny import byte_tokenizer

from jaxtune.config.schema import Dataset
from jaxtune.data.cache.documents import tokenize
from jaxtune.data.formats.labels import read_label_names
from jaxtune.data.reading.sources import open_source
from jaxtune.errors import UserError


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def line(**columns) -> bytes:
    return json.dumps(columns).encode()


def chat(*messages) -> bytes:
    return line(messages=messages)


GOOD_TEXT = line(text="a good sample")
GOOD_CHAT = chat({"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"})
GOOD_TOKENS = line(input_ids=[1, 2, 3], labels=[-100, 2, 3])
USER = {"role": "user", "content": "Hi"}

# name: a good line, a bad line, part of the error
BAD_LINES = {
    "bad UTF-8": (GOOD_TEXT, b'{"text": "caf\xe9"}', "not UTF-8: byte 0xe9"),
    "NUL": (GOOD_TEXT, b'{"text": "a\x00b"}', "NUL"),
    "half a line": (GOOD_TEXT, b'{"text": "begins but', "not JSON.*half a line"),
    "not an object": (GOOD_TEXT, b'["text"]', "expected an object"),
    "duplicate key": (GOOD_TEXT, b'{"text": "a", "text": "b"}', "'text' occurs twice"),
    "deep nesting": (GOOD_TEXT, b'{"text":' + b"[" * 100_000, "not usable JSON"),
    "missing column": (GOOD_TEXT, line(txt="a"), "missing column 'text'; it has txt"),
    "wrong type": (GOOD_TEXT, line(text=7), "'text' must be text, found 7; text_field='{text}' writes numbers as text"),
    "a number for an answer": (
        line(instruction="5?", output="5"),
        line(instruction="5?", output=5),
        "'output' must be text, found 5; output_field='{output}' writes numbers as text",
    ),
    "null": (GOOD_TEXT, line(text=None), "'text' must be text, found None"),
    "half a character": (GOOD_TEXT, b'{"text": "\\ud83d"}', "surrogate"),
    "10 MB of garbage": (GOOD_TEXT, b"x" * 10_000_000, "not JSON"),
    "messages are no list": (GOOD_CHAT, line(messages="Hi"), "expected a list of {role, content} messages"),
    "message is no object": (GOOD_CHAT, chat("Hi"), "message 0: expected an object"),
    "unknown role": (GOOD_CHAT, chat({"role": "asistant", "content": "x"}), "unknown role 'asistant'; known are"),
    "content is no text": (
        GOOD_CHAT,
        chat({"role": "user", "content": 3}),
        r"message 0 \(user\): content must be text",
    ),
    "an image": (
        GOOD_CHAT,
        chat({"role": "user", "content": [{"type": "text", "text": "See"}, {"type": "image"}]}),
        r"message 0 \(user\): content has a part of type 'image': images are read with vision",
    ),
    "a column of images": (
        GOOD_CHAT,
        line(messages=[USER, {"role": "assistant", "content": "Yo"}], images=["cat.png"]),
        "column 'images' holds images: images are read with vision.patches_per_row only",
    ),
    "an image of another layout": (GOOD_TEXT, line(image="cat.png", caption="a cat"), "column 'image' holds images"),
    "input_ids outside": (
        GOOD_TOKENS,
        line(input_ids=[1, 259]),
        r"input_ids\[1\] = 259 is not in the vocabulary of 259",
    ),
    "negative input_ids": (GOOD_TOKENS, line(input_ids=[1, -1]), "not in the vocabulary"),
    "input_ids are floats": (GOOD_TOKENS, line(input_ids=[1.5, 2]), "must be a list of integers"),
    "input_ids are no list": (GOOD_TOKENS, line(input_ids=5), "must be a list of integers"),
    "ragged input_ids": (GOOD_TOKENS, line(input_ids=[[1], [2, 3]]), "must be a list of integers"),
    "labels of another length": (
        GOOD_TOKENS,
        line(input_ids=[1, 2], labels=[2]),
        "'labels' has 1 entries, input_ids 2",
    ),
    "shifted labels": (GOOD_TOKENS, line(input_ids=[1, 2, 3], labels=[2, 3, -100]), r"labels\[0\] = 2 is neither"),
    # Valid samples that cannot be trained on.
    "empty text": (GOOD_TEXT, line(text=""), "no token of it is a target"),
    "no answer": (GOOD_CHAT, chat(USER), "no assistant message"),
    "every label ignored": (GOOD_TOKENS, line(input_ids=[1, 2], labels=[-100, -100]), "no token of it is a target"),
}


@pytest.mark.parametrize("good, bad, message", BAD_LINES.values(), ids=BAD_LINES)
def test_a_bad_line_is_named_or_skipped_and_counted(tokenizer, tmp_path, good, bad, message):
    file = tmp_path / "data.jsonl"
    file.write_bytes(b"\n".join([good, good, bad, good]) + b"\n")
    entries = (Dataset(path=str(file)),)
    with pytest.raises(UserError, match=rf"(?s){file}:3: .*{message}") as raised:
        tokenize(entries, tokenizer, tmp_path / "cache")
    assert len(str(raised.value)) < 500
    documents = tokenize(entries, tokenizer, tmp_path / "cache", "skip")
    assert len(documents) == 3 and documents.skipped_samples == 1
    assert "1 sample skipped" in documents.losses[0] and f"{file}:3" in documents.losses[0]
    again = tokenize(entries, tokenizer, tmp_path / "cache", "skip")  # from the cache
    assert again.skipped_samples == 1 and again.losses == documents.losses


LABELS = {
    "another name": ("good", "meh", "'meh' is not one of the 2 labels: bad, good"),
    "another number": (1, 2, "2 is not one of the 2 labels: bad, good"),
    "a negative number": (1, -1, "-1 is not one of the 2 labels"),
    "a number that is not whole": (0, 0.5, "0.5 is not one of the 2 labels"),
    "nothing": ("bad", None, "'label' must be the name or the number of a label, found None"),
    "several": ("bad", ["bad", "good"], "several labels of a sample are not supported"),
}


@pytest.mark.parametrize("good, bad, message", LABELS.values(), ids=LABELS)
def test_a_label_that_is_not_one_is_named_or_skipped(tokenizer, tmp_path, good, bad, message):
    """`labels` come from the training data, so this covers validation data too."""
    file = tmp_path / "data.jsonl"
    file.write_bytes(b"\n".join(line(text="a", label=label) for label in (good, good, bad)))
    arguments = (Dataset(path=str(file), type="classification"),), tokenizer, tmp_path / "cache"
    with pytest.raises(UserError, match=rf"{file}:3: .*{re.escape(message)}"):
        tokenize(*arguments, labels=("bad", "good"))
    assert len(tokenize(*arguments, "skip", ("bad", "good"))) == 2


@pytest.mark.parametrize(
    "labels, count, message",
    [
        ([0, 1, 3], None, r":3: label 3, but no sample has label 2: integers count from 0 without a gap"),
        ([1, 2, 2], None, r":1: label 1, but no sample has label 0"),
        ([0, "a", 1], None, r":1: label 0 is a number, but 'a' at .*:2 is text"),
        ([0, 1, 0.5], None, r":3: label 0.5 is not an integer; model.num_labels=1 is regression"),
        (["a", "a", "a"], None, r"all samples have the same label, 'a'"),
        (["a", "b", "c"], 2, r"model.num_labels=2, but the data has 3 labels: a, b, c"),
    ],
)
def test_labels_that_are_not_those_of_a_classifier_are_named(tmp_path, labels, count, message):
    file = tmp_path / "data.jsonl"
    file.write_bytes(b"\n".join(line(text="a", label=label) for label in labels))
    with pytest.raises(UserError, match=message):
        read_label_names((Dataset(path=str(file), type="classification"),), count)


def test_a_sample_without_its_label_or_text_is_named(tokenizer, tmp_path):
    file = tmp_path / "data.jsonl"
    file.write_bytes(line(text="a", label="good") + b"\n" + line(text="a") + b"\n" + line(label="bad"))
    entries = (Dataset(path=str(file), type="classification"),)
    with pytest.raises(UserError, match=rf"{file}:2: missing column 'label' \(target_column\); it has text"):
        read_label_names(entries)
    assert read_label_names(entries, on_bad_row="skip") == ("bad", "good")
    assert tokenize(entries, tokenizer, tmp_path / "cache", "skip", ("bad", "good")).skipped_samples == 2


def test_the_first_of_the_skipped_samples_are_listed(tokenizer, tmp_path):
    file = tmp_path / "data.jsonl"
    file.write_bytes(b"\n".join([GOOD_TEXT, *[b"{"] * 7]))
    documents = tokenize((Dataset(path=str(file)),), tokenizer, tmp_path / "cache", "skip")
    first, *listed, last = documents.losses[0].splitlines()
    assert first == "7 samples skipped:" and last == "  ..."
    assert [line.strip().partition(" ")[0] for line in listed] == [f"{file}:{number}:" for number in range(2, 7)]


def test_samples_without_a_target_are_all_counted_before_the_error(tokenizer, tmp_path):
    file = tmp_path / "data.jsonl"
    file.write_bytes(b"\n".join([GOOD_CHAT, chat(USER), GOOD_CHAT, chat(USER), chat(USER)]))
    with pytest.raises(UserError, match=f"^3 samples cannot be trained on; the first: {file}:2: "):
        tokenize((Dataset(path=str(file)),), tokenizer, tmp_path / "cache")


def test_a_turn_that_never_stops_is_refused(tmp_path):
    tokenizer = byte_tokenizer(
        tmp_path / "tokenizer", "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    )
    file = tmp_path / "data.jsonl"
    file.write_bytes(b"\n".join([GOOD_CHAT] * 3))
    with pytest.raises(UserError, match=r"3 samples cannot be trained on.*without a stop token"):
        tokenize((Dataset(path=str(file)),), tokenizer, tmp_path / "cache")


def test_a_valid_line_of_10_mb_is_a_sample(tokenizer, tmp_path):
    file = tmp_path / "data.jsonl"
    file.write_bytes(line(text="a", scan="x" * 10_000_000))
    assert tokenize((Dataset(path=str(file)),), tokenizer, tmp_path / "cache").lengths.tolist() == [2]


def test_a_line_without_end_is_not_read_into_memory(tokenizer, tmp_path):
    file = tmp_path / "data.jsonl"
    file.write_bytes(GOOD_TEXT + b"\n" + b"x" * 5000 + b"\n" + GOOD_TEXT + b"\n")
    entry = Dataset(path=str(file), max_sample_bytes=1000)
    with pytest.raises(UserError, match=f"{file}:2: the line is larger than max_sample_bytes=1000; raise it if"):
        tokenize((entry,), tokenizer, tmp_path / "cache")
    assert len(tokenize((entry,), tokenizer, tmp_path / "cache", "skip")) == 2


def written_as_table(path):
    pyarrow.parquet.write_table(pyarrow.table({"text": pyarrow.array(["x" * 5000] * 3).dictionary_encode()}), path)


def write_arrow(path, **columns):
    table = pyarrow.table(columns)
    with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)


def of_dictionary(numbers, *values):
    return pyarrow.DictionaryArray.from_arrays(pyarrow.array(numbers, pyarrow.int32()), list(values))


def written_as_arrow(path):
    lists = pyarrow.ListArray.from_arrays([0, 10**6], of_dictionary([0] * 10**6, "x"))
    write_arrow(path, text=of_dictionary([0], "a"), lists=lists)


LARGE = {
    "a.txt.gz": (lambda path: path.write_bytes(gzip.compress(b"x" * 5000)), "a.txt.gz: the decompressed file"),
    "a.json.gz": (lambda path: path.write_bytes(gzip.compress(b"[" + b" " * 5000 + b"]")), "gz: the decompressed file"),
    "a.jsonl.gz": (lambda path: path.write_bytes(gzip.compress(line(text="x" * 5000))), "a.jsonl.gz:1: the line"),
    "a.csv": (lambda path: path.write_text('text\n"' + "x\n" * 3000 + '"\n'), "a.csv:.*: a field"),
    "a.parquet": (written_as_table, "a.parquet row 0: the row"),
    "a.arrow": (written_as_arrow, "a.arrow row 0: the row"),
}


@pytest.mark.parametrize("name", LARGE)
def test_what_is_larger_in_memory_than_a_sample_may_be_is_refused(tokenizer, tmp_path, name):
    write, message = LARGE[name]
    write(tmp_path / name)
    entry = Dataset(path=str(tmp_path / name), max_sample_bytes=2000)
    with pytest.raises(UserError, match=f"{message} is larger than max_sample_bytes=2000; raise it"):
        tokenize((entry,), tokenizer, tmp_path / "cache")


def test_a_dictionary_of_arrow_is_decoded_row_by_row(tmp_path):
    """The decoded column would take 3 GB; the file has one megabyte."""
    write_arrow(tmp_path / "a.arrow", text=of_dictionary([1, 0] * 1500, "x" * 2 * 10**6, "a"), n=[*range(3000)])
    problems = []
    read = open_source(Dataset(path=str(tmp_path / "a.arrow"))).read(problems.append)
    rows = [row for _, row in itertools.islice(read, 4)]
    assert not problems and [(len(row["text"]), row["n"]) for row in rows] == [
        (1, 0),
        (2 * 10**6, 1),
        (1, 2),
        (2 * 10**6, 3),
    ]


CUT_OFF_ZSTD = pyarrow.compress(b'{"text": "a"}\n', codec="zstd", asbytes=True)[:-4]
# name: content, part of the error
BAD_FILES = {
    "empty.jsonl": (b"", "empty.jsonl: empty file"),
    "blank.jsonl": (b"\n\n", "no sample"),
    "empty.txt": (b" \n", "empty.txt: empty file"),
    "latin.txt": (b"caf\xe9", "latin.txt: not UTF-8"),
    "nul.txt": (b"a\0b", "nul.txt: holds a NUL"),
    "empty.json": (b"", "empty.json: empty file"),
    "half.json": (b'[{"text": "a"}, {"te', "half.json: not JSON.*half a line"),
    "mixed.json": (b'[{"text": "a"}, "b"]', "mixed.json row 1: expected an object"),
    "short.csv": (b"id,text\n1\n", "short.csv:2: the row and the header differ"),
    "long.csv": (b"id,text\n1,a\n2,b,c\n", "long.csv:3: the row and the header differ"),
    "latin.csv": (b"text\ncaf\xe9\n", "latin.csv:2: not UTF-8: .* encoding='cp1252'"),
    "none.jsonl.gz": (b"this is none", "none.jsonl.gz: cannot be read"),
    "cut.jsonl.gz": (gzip.compress(b'{"text": "a"}\n')[:-4], "cut.jsonl.gz: cannot be read"),
    "cut.jsonl.zst": (CUT_OFF_ZSTD, "cut.jsonl.zst: cannot be read"),
    "quote.csv": (b'text\n"never closed\n', "quote.csv:2: not CSV"),
    "columns.csv": (b"a,b\n1,2\n", "columns.csv:2: missing column: it has a, b, but needs tokenized: input_ids"),
    "semicolons.csv": (
        b"question;answer\na, b;c\n",
        "semicolons.csv: its fields are separated by ';', not by ',': .*; write the file with commas",
    ),
    "tabs.csv": (b"question\tanswer\na\tb\n", "separated by '.t', not by ',': .*; set ds_type='tsv'"),
    "headless.csv": (b"What is 2+2?,4\n3+3?,6\n", "headless.csv:2: if this is a CSV file without a header, write one"),
    "words.csv": (
        b"cat,chat\ndog,chien\n",
        "words.csv:2: the first line seems to be data, not a header: .* write a header before it.* Otherwise: missing",
    ),
    "names.csv": (b"english,french\nHow are you?,Ca va?\n", "names.csv:2: missing column: it has english, french"),
    "data.json": (
        b'{"data": [{"text": "a"}, {"text": "b"}]}',
        "data.json:1: if the objects in 'data' .2. are the samples, .*`jq .data FILE",
    ),
    "splits.json": (
        b'{\n "train": [{"text": "a"}],\n "test": [{"text": "b"}]\n}',
        "splits.json row 0: if the objects in 'train' .1. and 'test' .1. are the samples",
    ),
    "conv.jsonl": (
        b'{"conv": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}',
        r"conv.jsonl:1: column 'conv' holds messages: set messages_field='conv'.*datasets.0..messages_field=conv'",
    ),
    "talk.jsonl": (b'{"talk": [{"from": "human", "value": "x"}]}', "talk.jsonl:1: .* set messages_field='talk'"),
    "capitals.csv": (
        b"Question,Answer\nHow?,So\n",
        "capitals.csv:2: .* capitals only: set instruction_field='Question' and output_field='Answer'",
    ),
    "capital.jsonl": (b'{"Text": "a"}', "capital.jsonl:1: .* capitals only: set text_field='Text'"),
    "utf16.csv": ("text\na\n".encode("utf-16"), "utf16.csv:1: UTF-16, not UTF-8; convert the file: `iconv"),
    "utf16.txt": ("a".encode("utf-16"), "utf16.txt: UTF-16, not UTF-8; convert the file"),
    "a.zip": (b"PK\x03\x04\0", "a.zip: an archive is not read; unpack it"),
    "no.parquet": (b"PAR1 this is none", "no.parquet: not a readable parquet file"),
    "no.arrow": (b"this is none", "no.arrow: not a readable arrow file"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_is_named(tokenizer, tmp_path, name):
    content, message = BAD_FILES[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=f"(?s){message}"):
        tokenize((Dataset(path=str(tmp_path / name)),), tokenizer, tmp_path / "cache")


def test_one_object_over_several_lines_is_a_sample(tokenizer, tmp_path):
    (tmp_path / "a.json").write_text(json.dumps({"text": "a"}, indent=1))
    assert len(tokenize((Dataset(path=str(tmp_path / "a.json")),), tokenizer, tmp_path / "cache")) == 1


def test_json_lines_that_are_named_text_are_hinted_at(tokenizer, tmp_path, caplog):
    (tmp_path / "a.txt").write_bytes(GOOD_TEXT + b"\n" + GOOD_TEXT + b"\n")
    for ds_type, documents, hints in ((None, 1, 1), ("text", 1, 0), ("json", 2, 0)):
        caplog.clear()
        read = tokenize((Dataset(path=str(tmp_path / "a.txt"), ds_type=ds_type),), tokenizer, tmp_path / "cache")
        assert len(read) == documents and caplog.text.count("holds JSON lines; ds_type='json' reads them") == hints


def test_a_folder_without_a_file_to_read_says_what_it_holds(tokenizer, tmp_path):
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "a.png").write_bytes(b"\x89PNG\0")
    with pytest.raises(UserError, match="no file in .*images is text or a file of samples; it holds .png"):
        tokenize((Dataset(path=str(tmp_path / "images")),), tokenizer, tmp_path / "cache")


def test_a_bad_table_is_one_message(tokenizer, tmp_path, capfd):
    written_as_table(tmp_path / "a.parquet")
    (tmp_path / "a.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-20])
    with pytest.raises(UserError, match="a.parquet: not a readable parquet file"):
        tokenize((Dataset(path=str(tmp_path / "a.parquet")),), tokenizer, tmp_path / "cache")
    assert logging.getLogger("datasets.packaged_modules.parquet.parquet").getEffectiveLevel() > logging.ERROR


def test_a_bad_file_among_good_ones_is_skipped_and_counted(tokenizer, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    for name in ("a.py", "b.py", "c.py"):
        (folder / name).write_text("print()")
    (folder / "b.py").write_bytes(b"caf\xe9")
    with pytest.raises(UserError, match=r"b\.py: not UTF-8"):
        tokenize((Dataset(path=str(folder)),), tokenizer, tmp_path / "cache")
    documents = tokenize((Dataset(path=str(folder)),), tokenizer, tmp_path / "cache", "skip")
    assert len(documents) == 2 and documents.skipped_samples == 1


def test_bad_rows_of_a_table_are_named_by_row(tokenizer, tmp_path):
    datasets.Dataset.from_dict({"text": ["a", None, "c"]}).to_parquet(tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"a\.parquet row 1: column 'text' must be text, found None"):
        tokenize((Dataset(path=str(tmp_path / "a.parquet")),), tokenizer, tmp_path / "cache")


@pytest.mark.parametrize(
    "options, message",
    [
        ({"path": None}, "no path"),
        ({"path": "missing.jsonl"}, "no such file or folder: missing.jsonl"),
        ({"path": "/nowhere/at/all"}, "no such file or folder"),
        ({"path": "{folder}", "glob": "*.rs"}, r"matches '\*.rs'"),
        ({"path": "{folder}/a.jsonl", "revision": "main"}, "revision = 'main' has no effect: .* not on the hub"),
        ({"path": "{folder}/a.jsonl", "split": "test"}, "split = 'test' has no effect: .* names the files"),
        ({"path": "{folder}", "glob": "a*", "split": "test"}, "split = 'test' has no effect: glob"),
        ({"path": "{folder}/a.jsonl", "encoding": "latin-ish"}, "encoding='latin-ish' is not known"),
        ({"path": "{folder}/a.jsonl", "encoding": "utf-16"}, "does not end a line with one byte"),
        ({"path": "someone/texts", "ds_type": "json"}, "ds_type = 'json' has no effect: .* on the hub"),
        ({"path": "{folder}/a.jsonl", "type": "conversation"}, "missing column.*conversation: messages"),
        ({"path": "{folder}/q.jsonl", "prompt_format": "{instruction} {inptu}"}, "needs instruction: .* and inptu"),
        ({"path": "{folder}/q.jsonl", "prompt_format": "{instruction"}, "{instruction': expected '}'"),
    ],
)
def test_an_entry_that_cannot_be_followed_says_why(tokenizer, tmp_path, options, message):
    (tmp_path / "a.jsonl").write_bytes(GOOD_TEXT)
    (tmp_path / "q.jsonl").write_bytes(line(instruction="a", output="b"))
    options = {key: value and value.replace("{folder}", str(tmp_path)) for key, value in options.items()}
    for on_bad_row in ("error", "skip"):
        with pytest.raises(UserError, match=message):
            tokenize((Dataset(**options),), tokenizer, tmp_path / "cache", on_bad_row)


def test_mutated_files_end_in_typed_errors(tokenizer, tmp_path):
    """Any byte of a data file may be wrong: the outcome is documents or a UserError."""
    rng = np.random.default_rng(0)
    whole = b"\n".join([GOOD_TEXT, line(text="été"), GOOD_TEXT]) + b"\n"
    file = tmp_path / "data.jsonl"
    for _ in range(150):
        mutated = bytearray(whole)
        for place in rng.integers(0, len(whole), 2):
            mutated[place] = rng.integers(0, 256)
        file.write_bytes(bytes(mutated[: rng.integers(1, len(whole))]))
        try:
            assert len(tokenize((Dataset(path=str(file)),), tokenizer, tmp_path / "cache", "skip")) >= 1
        except UserError as error:
            assert str(tmp_path) in str(error)
