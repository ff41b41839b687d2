"""From files to tokenised documents, and their cache."""

import contextlib
import csv
import errno
import itertools
import json
import re
import socket
import threading
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

import datasets
import numpy as np
import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import byte_tokenizer

from jaxtune.config.schema import ChatOptions, Config, DataOptions, Dataset, TrainOptions
from jaxtune.data.cache import documents as documents_module
from jaxtune.data.cache import parts as parts_module
from jaxtune.data.cache.documents import prepare_shard, tokenize
from jaxtune.data.chat.encoding import Encoder
from jaxtune.data.rows.splits import open_documents
from jaxtune.errors import UserError

TEXTS = [{"text": "one"}, {"text": "two, “2”"}, {"text": "three\nlines\n"}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def read(tokenizer, tmp_path):
    """Return a function that tokenises one entry; it returns each document as text, and its trained part."""

    def get(path, on_bad_row="error", **options):
        documents = tokenize((Dataset(path=str(path), **options),), tokenizer, tmp_path / "cache", on_bad_row)
        result = []
        for i in range(len(documents)):
            tokens, weights = documents.read(i, 0, 10**9)
            result.append((tokenizer.decode(tokens), tokenizer.decode(tokens[weights > 0])))
        return result, documents

    return get


def jsonl(path: Path, rows) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def write_csv(path, delimiter=","):
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ["text"], delimiter=delimiter)
        writer.writeheader()
        writer.writerows(TEXTS)


def write_compressed(path, write=jsonl):
    """Write the file with `write`, in two parts compressed one by one, as parallel programs do."""
    plain = path.with_suffix("")
    write(plain, TEXTS)
    content = plain.read_bytes()
    plain.unlink()
    with pyarrow.output_stream(str(path), compression="detect") as file:
        file.write(content[:20])
    first = path.read_bytes()
    with pyarrow.output_stream(str(path), compression="detect") as file:
        file.write(content[20:])
    path.write_bytes(first + path.read_bytes())


WRITERS = {
    "a.jsonl": lambda path: jsonl(path, TEXTS),
    "a.json": lambda path: path.write_text(json.dumps(TEXTS, indent=1)),
    "lines.json": lambda path: jsonl(path, TEXTS),
    "a.csv": write_csv,
    "a.tsv": lambda path: write_csv(path, "\t"),
    "a.jsonl.gz": write_compressed,
    "a.jsonl.zst": write_compressed,
    "a.json.bz2": lambda path: write_compressed(path, lambda plain, rows: plain.write_text(json.dumps(rows))),
    "a.parquet": lambda path: datasets.Dataset.from_list(TEXTS).to_parquet(path),
    "a.arrow": lambda path: datasets.Dataset.from_list(TEXTS).save_to_disk(path),
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_kind_of_file_gives_the_same_documents_that_end_in_eos(read, tmp_path, name):
    WRITERS[name](tmp_path / name)
    texts, documents = read(tmp_path / name)
    assert texts == [(row["text"] + "<|im_end|>",) * 2 for row in TEXTS]
    assert documents.continuous.all() and "text from text, 3 documents" in documents.notes[0]
    assert [text for text, _ in read(tmp_path / name, samples=2)[0]] == [
        row["text"] + "<|im_end|>" for row in TEXTS[:2]
    ]


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_a_table_gives_the_objects_that_json_lines_give(tmp_path, caplog, kind):
    """Arrow gives each object the keys of all objects, with null for those it lacks: templates must not see them."""
    caplog.set_level("INFO", logger="jaxtune")
    template = (
        "{{ tools | tojson }}\n{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
        "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    )
    tokenizer, rows = byte_tokenizer(tmp_path / "tokenizer", chat_template=template), []
    for name, key in (("weather", "city"), ("clock", "zone")):
        call = {"type": "function", "function": {"name": name, "arguments": {key: "x"}}}
        messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        parameters = {"type": "object", "properties": {key: {"type": "string"}}}
        tool = {"type": "function", "function": {"name": name, "parameters": parameters}}
        rows.append({"messages": messages, "tools": [tool]})
    table = datasets.Dataset.from_list(rows)
    if kind == "parquet":
        table.to_parquet(tmp_path / "a.parquet")
    else:
        table.save_to_disk(tmp_path / "saved")
    texts = []
    for path in (jsonl(tmp_path / "a.jsonl", rows), tmp_path / ("a.parquet" if kind == "parquet" else "saved")):
        documents = tokenize((Dataset(path=str(path)),), tokenizer, tmp_path / "cache")
        texts.append([tokenizer.decode(documents.read(i, 0, 9999)[0]) for i in range(2)])
        nulls = f"{path}/?[^:]*: keys in column 'tools' that are null are left out, as Parquet and Arrow"
        again = tokenize((Dataset(path=str(path)),), tokenizer, tmp_path / "cache")
        for notes in (documents.notes, again.notes):  # read again, and from the cache
            assert len([note for note in notes if re.match(nulls, note)]) == (0 if path.suffix == ".jsonl" else 1)
    assert "null" not in "".join(texts[0] + texts[1])
    of_lines, read = ([json.loads(text.partition("\n")[0]) for text in each] for each in texts)
    assert of_lines == read == [row["tools"] for row in rows]


def test_the_first_documents_know_where_they_are_from(tmp_path, monkeypatch):
    """From a folder, in several parts, and from the cache; later documents know only the entry."""
    monkeypatch.setattr(parts_module, "_BLOCK_SAMPLES", 40)
    monkeypatch.setattr(parts_module, "_PART_SIZE", 1)
    folder = tmp_path / "texts"
    folder.mkdir()
    for name in ("a", "b"):
        jsonl(folder / f"{name}.jsonl", [{"text": "x"} for _ in range(60)])
    tokenizer = byte_tokenizer(tmp_path / "tokenizer")
    for _ in range(2):
        documents = tokenize((Dataset(path=str(folder)),), tokenizer, tmp_path / "cache")
        assert [documents.where(i) for i in (0, 59, 60, 99)] == [
            f"{folder}/{place}" for place in ("a.jsonl:1", "a.jsonl:60", "b.jsonl:1", "b.jsonl:40")
        ]
        assert documents.where(100) == str(folder)


def test_a_folder_of_source_files_is_one_document_a_file_in_the_order_of_paths(read, tmp_path):
    for name, text in {"b.py": "B", "a/z.py": "Z", "a/y.txt": "Y", "empty.py": "", ".git/x.py": "X"}.items():
        (tmp_path / "code" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "code" / name).write_text(text)
    (tmp_path / "code" / "binary.pyc").write_bytes(b"\x00\x01")
    assert [text for text, _ in read(tmp_path / "code")[0]] == ["Y<|im_end|>", "Z<|im_end|>", "B<|im_end|>"]
    assert [text for text, _ in read(tmp_path / "code", glob="**/*.py")[0]] == ["Z<|im_end|>", "B<|im_end|>"]
    assert [text for text, _ in read(tmp_path / "code" / "b.py")[0]] == ["B<|im_end|>"]


def test_compressed_text_is_a_document_too(read, tmp_path):
    (tmp_path / "code").mkdir()
    write_compressed(tmp_path / "code" / "a.txt.gz", lambda plain, rows: plain.write_text("one text of some length"))
    assert [text for text, _ in read(tmp_path / "code")[0]] == ["one text of some length<|im_end|>"]


def test_another_encoding_is_read_where_it_is_named(read, tmp_path):
    (tmp_path / "a.csv").write_bytes("text\ncaf\xe9 \u20ac\n".encode("cp1252"))
    assert read(tmp_path / "a.csv", encoding="cp1252")[0][0][0] == "caf\xe9 \u20ac<|im_end|>"


def test_a_folder_of_data_files_is_read_by_split(read, tmp_path):
    jsonl(tmp_path / "plain" / "2.jsonl", TEXTS[1:])
    jsonl(tmp_path / "plain" / "1.jsonl", TEXTS[:1])
    (tmp_path / "plain" / "README.md").write_text("not data")
    assert [text for text, _ in read(tmp_path / "plain")[0]] == [row["text"] + "<|im_end|>" for row in TEXTS]
    for i, split in enumerate(("train", "test")):
        jsonl(tmp_path / "named" / f"{split}.jsonl", TEXTS[i : i + 1])
        datasets.DatasetDict({"train": datasets.Dataset.from_list(TEXTS[:1])}).save_to_disk(tmp_path / "saved")
    assert [text for text, _ in read(tmp_path / "named")[0]] == ["one<|im_end|>"]
    assert [text for text, _ in read(tmp_path / "named", split="test")[0]] == [TEXTS[1]["text"] + "<|im_end|>"]
    assert [text for text, _ in read(tmp_path / "saved")[0]] == ["one<|im_end|>"]
    with pytest.raises(UserError, match="train, test"):
        read(tmp_path / "named", split="dev")


def test_a_hub_id_is_read_through_datasets_and_names_rows(read, tmp_path, monkeypatch):
    calls = []

    def load_dataset(*args, **kwargs):
        calls.append((args, kwargs))
        return datasets.Dataset.from_list([*TEXTS, {"text": None}] if kwargs["split"] == "validation" else TEXTS)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    texts, _ = read("someone/texts", subset="en", revision="v1")
    assert [text for text, _ in texts] == [row["text"] + "<|im_end|>" for row in TEXTS]
    assert calls == [(("someone/texts", "en"), {"split": "train", "revision": "v1"})]
    with pytest.raises(UserError, match=r"someone/texts \(validation\) row 3: column 'text' must be text"):
        read("someone/texts", split="validation")


class Builder:
    """A dataset on the hub that can be streamed; counts the rows that are pulled."""

    def __init__(self, commit, rows=TEXTS * 1000, fails_at=None):
        self.hash, self.rows, self.fails_at, self.pulled = commit, rows, fails_at, 0

    def as_streaming_dataset(self, split):
        def pull():
            for row in self.rows:
                if self.pulled == self.fails_at:
                    raise ConnectionError("the line went dead")
                self.pulled += 1
                yield row

        return datasets.IterableDataset.from_generator(pull, split=split)


def test_the_first_samples_of_a_hub_id_are_streamed_until_its_commit_changes(read, monkeypatch):
    calls, builder = [], Builder("commit 1")
    monkeypatch.setattr(
        datasets, "load_dataset_builder", lambda *args, **kwargs: (calls.append((args, kwargs)), builder)[1]
    )
    options = dict(subset="en", split="validation", revision="v1", samples=3)
    texts, _ = read("someone/texts", **options)
    assert [text for text, _ in texts] == [row["text"] + "<|im_end|>" for row in TEXTS]
    assert calls == [(("someone/texts", "en"), {"revision": "v1"})]
    assert builder.pulled == 3
    read("someone/texts", **options)
    assert builder.pulled == 3  # from the cache
    builder = Builder("commit 2", TEXTS[::-1])
    assert [text for text, _ in read("someone/texts", **options)[0]] == [
        row["text"] + "<|im_end|>" for row in TEXTS[::-1]
    ]
    builder = Builder("commit 3", fails_at=2)
    for on_bad_row in ("error", "skip"):
        with pytest.raises(UserError, match="someone/texts cannot be read to its end: the line went dead"):
            read("someone/texts", **options, on_bad_row=on_bad_row)


def test_what_the_hub_cannot_stream_is_loaded(read, monkeypatch):
    def cannot(split):
        raise NotImplementedError("an archive")

    builder = Builder("commit")
    builder.as_streaming_dataset = cannot
    monkeypatch.setattr(datasets, "load_dataset_builder", lambda *args, **kwargs: builder)
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: datasets.Dataset.from_list(TEXTS))
    for split in ("train", "train[:50%]"):
        assert [text for text, _ in read("someone/texts", split=split, samples=1)[0]] == ["one<|im_end|>"]


CHAT = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYo<|im_end|>\n"
SYSTEM = "<|im_start|>system\nBe.<|im_end|>\n"
FORMS = {
    "messages": ({"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]}, {}, CHAT),
    "sharegpt": ({"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yo"}]}, {}, CHAT),
    "system field": (
        {"s": "Be.", "chat": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]},
        {"messages_field": "chat", "system_field": "s"},
        SYSTEM + CHAT,
    ),
    "instruction": ({"instruction": "Hi", "output": "Yo", "input": ""}, {}, CHAT),
    "instruction with input": ({"instruction": "Hi", "output": "Yo", "input": "x"}, {}, CHAT.replace("Hi", "Hi\nx")),
    "prompt, completion": ({"prompt": "Hi", "completion": "Yo"}, {}, CHAT),
    "system prompt": ({"instruction": "Hi", "output": "Yo"}, {"system_prompt": "Be."}, SYSTEM + CHAT),
    "prompt format": (
        {"q": "Hi", "a": "Yo", "c": "x"},
        {
            "instruction_field": "q",
            "output_field": "a",
            "input_field": "c",
            "prompt_format": "Q {instruction} {{{input}}}\nA",
        },
        "Q Hi {x}\nAYo<|im_end|>",
    ),
    "prompt format without input": (
        {"instruction": "Hi", "output": "Yo"},
        {
            "prompt_format": "{instruction}{input}",
            "prompt_format_no_input": "{system}: {instruction}\n",
            "system_prompt": "S",
        },
        "S: Hi\nYo<|im_end|>",
    ),
}


@pytest.mark.parametrize("row, options, text", FORMS.values(), ids=FORMS)
def test_the_columns_tell_the_type_and_only_the_answer_is_trained(read, tmp_path, row, options, text):
    texts, documents = read(jsonl(tmp_path / "a.jsonl", [row]), **options)
    assert texts == [(text, "Yo<|im_end|>")]
    assert not documents.continuous.any()


def test_documents_that_are_longer_than_an_entry_allows_are_left_out_and_counted(read, tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [{"text": "a" * length} for length in (3, 4, 5, 6)])
    texts, documents = read(path, max_tokens=5)
    assert [text for text, _ in texts] == ["aaa<|im_end|>", "aaaa<|im_end|>"]
    assert documents.losses == (f"{path}: 2 documents of more than 5 tokens left out",)
    with pytest.raises(UserError, match="no sample that can be trained on; 4 documents of more than 2 tokens left out"):
        read(path, max_tokens=2)


@pytest.mark.parametrize(
    ("longer", "kept"),
    [
        ("left", [[7, 8], [3, 4, 5, 6]]),
        ("right", [[7, 8], [1, 2, 3, 4]]),
        ("split", [[7, 8], [1, 2, 3, 4], [5, 6]]),
    ],
)
def test_documents_that_are_longer_than_an_entry_allows_are_cut(tmp_path, tokenizer, longer, kept):
    rows = [{"input_ids": [7, 8]}, {"input_ids": [1, 2, 3, 4, 5, 6]}]
    entry = Dataset(path=str(jsonl(tmp_path / "a.jsonl", rows)), max_tokens=4, longer=longer)
    documents = tokenize((entry,), tokenizer, tmp_path / "cache")
    tokens, ends = documents.parts[0].values["tokens"], documents.parts[0].offsets.tolist()
    assert [tokens[start:end].tolist() for start, end in itertools.pairwise(ends)] == kept
    assert not documents.losses


def test_tokenized_samples_are_taken_as_they_are(tmp_path, tokenizer):
    rows = [
        {"input_ids": [5, 6, 7, 8], "labels": [-100, -100, 7, 8]},
        {"input_ids": [1, 2, 3]},
        {"input_ids": [1, 2, 0, 0], "labels": [1, 2, -100, -100], "attention_mask": [1, 1, 0, 0]},
    ]
    documents = tokenize((Dataset(path=str(jsonl(tmp_path / "a.jsonl", rows))),), tokenizer, tmp_path / "cache")
    [part] = documents.parts
    assert part.values["tokens"].tolist() == [5, 6, 7, 8, 1, 2, 3, 1, 2]
    assert part.values["loss_weight"].tolist() == [0, 0, 1, 1, 1, 1, 1, 1, 1]
    assert part.offsets.tolist() == [0, 4, 7, 9] and part.units.tolist() == [0, 1, 2, 3]
    assert documents.lengths.tolist() == [4, 3, 2] and documents.targets.tolist() == [2, 2, 1]
    assert documents.notes[0].startswith(f"{tmp_path}/a.jsonl: tokenized from input_ids")


def test_the_cache_is_used_until_data_options_or_tokenizer_change(tokenizer, tmp_path, monkeypatch):
    written = []
    write = documents_module.write_entry
    monkeypatch.setattr(
        documents_module, "write_entry", lambda folder, *rest: (written.append(folder), write(folder, *rest))
    )
    path = jsonl(tmp_path / "a.jsonl", TEXTS)
    entry = Dataset(path=str(path))

    def times(entry, tokenizer=tokenizer, on_bad_row="error", **options):
        written.clear()
        documents = tokenize((entry,), tokenizer, tmp_path / "cache", on_bad_row, **options)
        return len(written), documents.key

    made, key = times(entry)
    assert made == 1 and times(entry) == (0, key)
    assert times(replace(entry, samples=2))[0] == 1
    assert times(entry, on_bad_row="skip")[0] == 1
    assert times(entry, chat=ChatOptions(loss_scale="last_round"))[0] == 1
    assert times(entry, byte_tokenizer(tmp_path / "other", chat_template="{{ messages }}"))[0] == 1
    jsonl(path, [{"text": "new"}])
    made, new_key = times(entry)
    assert made == 1 and new_key != key
    copy = jsonl(tmp_path / "copy" / "b.jsonl", TEXTS)
    assert times(Dataset(path=str(copy))) == (1, key)  # the same data at another path are the same data


def test_processes_that_start_together_tokenise_once(tokenizer, tmp_path, monkeypatch):
    written, write = [], documents_module.write_entry
    monkeypatch.setattr(
        documents_module, "write_entry", lambda folder, *rest: (written.append(folder), write(folder, *rest))
    )
    entry = Dataset(path=str(jsonl(tmp_path / "a.jsonl", TEXTS)))
    results = []
    threads = [
        threading.Thread(target=lambda: results.append(tokenize((entry,), tokenizer, tmp_path / "cache")))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(written) == 1 and len(results) == 4
    tokens = [one.parts[0].values["tokens"] for one in results]
    assert all(np.array_equal(one, tokens[0]) for one in tokens)


def test_without_locks_the_first_to_finish_wins(tokenizer, tmp_path, monkeypatch):
    entry = Dataset(path=str(jsonl(tmp_path / "a.jsonl", TEXTS)))
    cache = tmp_path / "cache"

    def no_locks(*_):
        raise OSError("no locks here")

    monkeypatch.setattr(documents_module.fcntl, "flock", no_locks)
    write = documents_module.write_entry

    def beaten(folder, *rest):
        write(folder.with_name("elsewhere"), *rest)
        (cache / "elsewhere").rename(folder)
        write(folder, *rest)

    monkeypatch.setattr(documents_module, "write_entry", beaten)
    assert len(tokenize((entry,), tokenizer, cache)) == 3
    assert not list(cache.glob("*.tmp"))


def test_what_a_killed_or_failed_run_left_behind_is_cleared(tokenizer, tmp_path):
    path = jsonl(tmp_path / "a.jsonl", TEXTS)
    entry, cache = Dataset(path=str(path)), tmp_path / "cache"
    tokenize((entry,), tokenizer, cache)
    [folder] = (file for file in cache.iterdir() if file.is_dir())
    folder.rename(cache / f"{folder.name}.{socket.gethostname()}.99999.tmp")  # as after a kill before the rename
    assert len(tokenize((entry,), tokenizer, cache)) == 3
    assert not list(cache.glob("*.tmp"))
    path.write_text('{"text": "a"}\n{"text"')
    with pytest.raises(UserError):
        tokenize((entry,), tokenizer, cache)
    assert not list(cache.glob("*.tmp"))


@pytest.mark.parametrize("work", [tokenize, partial(prepare_shard, shard=(0, 1))])
def test_a_full_disk_is_named_with_its_folder_and_option(tokenizer, tmp_path, monkeypatch, work):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(documents_module.token_cache, "write", full)
    entry, cache = Dataset(path=str(jsonl(tmp_path / "a.jsonl", TEXTS))), tmp_path / "cache"
    with pytest.raises(UserError, match=f"^{cache}: No space left on device; make room there, or set data.cache_dir"):
        work((entry,), tokenizer, cache)


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.unlink()  # it is mapped into memory
    file.write_bytes(content)


def empty(file: Path) -> None:
    file.unlink()
    file.touch()


CACHE_FILES = [
    *("tokens.bin", "loss_weight.bin", "offsets.npy", "units.npy", "targets.npy", "continuous.npy"),
    *("summary.json", "manifest.json"),
]


@pytest.mark.parametrize("damage", [flip_a_bit, empty, Path.unlink])
@pytest.mark.parametrize("name", CACHE_FILES)
def test_a_damaged_cache_is_said_and_made_again(tokenizer, tmp_path, caplog, name, damage):
    entry, cache = Dataset(path=str(jsonl(tmp_path / "a.jsonl", TEXTS))), tmp_path / "cache"
    first = tokenize((entry,), tokenizer, cache)
    damage(next(cache.glob(f"*/{name}")))
    for warnings in (1, 0):
        caplog.clear()
        again = tokenize((entry,), tokenizer, cache)
        assert again.key == first.key and np.array_equal(again.targets, first.targets)
        assert all(np.array_equal(again.read(i, 0, 99), first.read(i, 0, 99)) for i in range(3))
        lines = [record.message for record in caplog.records]
        assert len(lines) == warnings and all(name in line and "a.jsonl is tokenised again" in line for line in lines)
    assert not list(cache.glob("*.tmp"))


def test_a_damaged_part_of_a_run_that_was_killed_is_made_again(tokenizer, tmp_path, caplog):
    entry, cache = Dataset(path=str(jsonl(tmp_path / "a.jsonl", TEXTS))), tmp_path / "cache"
    prepare_shard((entry,), tokenizer, cache, (0, 1))
    flip_a_bit(next(cache.glob("*.parts/0/tokens.bin")))
    assert tokenizer.decode(tokenize((entry,), tokenizer, cache).read(0, 0, 99)[0]) == "one<|im_end|>"
    assert "tokens.bin: content differs from its checksum" in caplog.text


def test_damaged_documents_whose_source_may_not_be_read_are_an_error(tokenizer, tmp_path):
    entry, cache = Dataset(path=str(jsonl(tmp_path / "a.jsonl", TEXTS))), tmp_path / "cache"
    tokenize((entry,), tokenizer, cache)
    [file] = cache.glob("*/tokens.bin")
    flip_a_bit(file)
    with pytest.raises(UserError, match=f"{file.parent} is damaged .tokens.bin: content differs.* source .*a.jsonl"):
        tokenize((entry,), tokenizer, cache, cache_only=True)


def test_validation_data_is_a_part_or_data_of_its_own(tokenizer, tmp_path):
    entry = Dataset(path=str(jsonl(tmp_path / "a.jsonl", TEXTS)))
    eval_dataset = Dataset(path=str(jsonl(tmp_path / "b.jsonl", TEXTS[:2])))
    config = Config(data=DataOptions(datasets=(entry,)), train=TrainOptions(output_dir=str(tmp_path / "runs")))
    assert open_documents(config, tokenizer)[1] == {}
    assert (tmp_path / "runs" / "cache").is_dir()
    for held_out, sizes in ((0.3, [2, 1]), (1, [2, 1]), (2, [1, 2])):
        part = open_documents(replace(config, data=replace(config.data, validation_split=held_out)), tokenizer)
        assert [len(part[0]), len(part[1][""])] == sizes
    with pytest.raises(UserError, match="validation_split = 3, but there are only 3 documents"):
        open_documents(replace(config, data=replace(config.data, validation_split=3)), tokenizer)
    separate = open_documents(replace(config, data=replace(config.data, eval_datasets=(eval_dataset,))), tokenizer)
    assert [len(separate[0]), len(separate[1][""])] == [3, 2]
    named = tuple(replace(eval_dataset, name=name) for name in ("code", None, "text", "code"))
    _, sets = open_documents(replace(config, data=replace(config.data, eval_datasets=named)), tokenizer)
    assert {name: len(documents) for name, documents in sets.items()} == {"code": 4, "": 2, "text": 2}


def test_which_documents_are_held_out_has_a_seed_of_its_own(tokenizer, tmp_path):
    entry = Dataset(path=str(jsonl(tmp_path / "a.jsonl", [{"text": str(i)} for i in range(40)])))
    config = Config(
        data=DataOptions(datasets=(entry,), validation_split=8), train=TrainOptions(output_dir=str(tmp_path / "runs"))
    )

    def held_out(**seeds) -> list[int]:
        seeded = replace(config, data=replace(config.data, **seeds))
        return open_documents(seeded, tokenizer)[1][""].chosen.tolist()

    assert held_out(seed=5) == held_out(seed=1, validation_seed=5) != held_out(seed=1)


def test_a_token_without_an_embedding_is_named(tokenizer, tmp_path):
    """The tokenizer has tokens that the model lacks: an error if the data contain one."""
    config = Config(train=TrainOptions(output_dir=str(tmp_path / "runs")))
    most = len(tokenizer) - 1
    for name, ids in (("without", [1, 2, most - 1]), ("with", [1, 2, most])):
        entry = Dataset(path=str(jsonl(tmp_path / f"{name}.jsonl", [{"input_ids": ids}] * 2)))
        refused = pytest.raises(UserError, match=rf"token {most}, .* and the model has embeddings for {most} tokens")
        with refused if name == "with" else contextlib.nullcontext():
            open_documents(replace(config, data=DataOptions(datasets=(entry,))), tokenizer, most)


CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]
ALPACA = {"instruction": "Hi", "output": "Yo"}


@pytest.mark.parametrize("row", [{"messages": CHAT}, ALPACA], ids=["conversation", "instruction"])
def test_auto_uses_a_system_column_and_says_which_columns_it_does_not(read, tmp_path, row):
    rows = [row | {"system": "Be.", "id": 1}, row | {"system": "Be.", "lang": "en"}]
    texts, documents = read(jsonl(tmp_path / "a.jsonl", rows))
    assert all(text.startswith("<|im_start|>system\nBe.<|im_end|>") for text, _ in texts)
    assert documents.losses == (f"{tmp_path}/a.jsonl: 2 columns are not used: 'id', 'lang'",)


def test_a_type_that_is_given_uses_what_is_given_and_names_the_option_for_the_rest(read, tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [{"messages": CHAT, "system": "Be.", "tools": [{"name": "f"}]}])
    texts, documents = read(path, type="conversation")
    assert "Be." not in texts[0][0]
    (loss,) = documents.losses
    assert loss.endswith(
        "2 columns are not used: 'system' (system_field='system' would), 'tools' (tools_field='tools' would)"
    )
    assert "Be." in read(path, type="conversation", system_field="system")[0][0][0]


def test_a_tools_column_reaches_the_template_and_is_said_where_that_leaves_it_out(read, tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [{"messages": CHAT, "tools": [{"name": "f"}]}, {"messages": CHAT}])
    assert [note.partition("a.jsonl: ")[2] for note in read(path)[1].notes[1:]] == [
        "tools are left out by the chat template"
    ]


def test_running_text_needs_a_token_that_ends_it(tmp_path):
    tokenizer = byte_tokenizer(tmp_path / "tokenizer", eos=None)
    path = jsonl(tmp_path / "a.jsonl", TEXTS)
    with pytest.raises(UserError, match="no end-of-sequence token.*set eos_token"):
        tokenize((Dataset(path=str(path)),), tokenizer, tmp_path / "cache")


def test_preference_data_is_named(read, tmp_path):
    with pytest.raises(UserError, match="preference data.*set preference.loss"):
        read(jsonl(tmp_path / "a.jsonl", [{"prompt": "a", "chosen": "b", "rejected": "c"}]))
    with pytest.raises(UserError, match="'kto' learns from single ones.*columns prompt, completion and label"):
        read(tmp_path / "a.jsonl", type="unpaired_preference")
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    with pytest.raises(UserError, match="'messages' holds a conversation, and this run learns from.* type preference"):
        read(jsonl(tmp_path / "b.jsonl", [{"messages": talk}]), type="preference")


def test_columns_of_other_names_are_answered_with_the_options_that_name_them(read, tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [{"frage": "Hi", "antwort": "Yo"}])
    with pytest.raises(UserError, match=r"instruction \(instruction_field\) and output \(output_field\)"):
        read(path)
    assert "Yo" in read(path, type="instruction", instruction_field="frage", output_field="antwort")[0][0][1]


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """Return a cache, three entries, their texts (all different), and a list of the texts that were tokenised."""
    folder = tmp_path_factory.mktemp("three")
    texts = {f"{name}.jsonl": [f"{name} {i}" for i in range(count)] for name, count in (("a", 2), ("b", 1), ("c", 3))}
    for name, lines in texts.items():
        jsonl(folder / name, [{"text": text} for text in lines])
    return folder / "cache", [Dataset(path=str(folder / name)) for name in texts], list(texts.values()), []


@given(
    order=st.lists(st.integers(0, 2), min_size=1, max_size=4),
    evaluated=st.lists(st.integers(0, 2), max_size=2),
    split=st.sampled_from([0.0, 0.3]),
    data=st.fixed_dictionaries({"shuffle": st.booleans(), "packing": st.booleans(), "seq_len": st.integers(8, 64)}),
)
@settings(deadline=None, max_examples=30)
def test_no_entry_is_tokenised_again_whatever_stands_beside_it(tokenizer, three, order, evaluated, split, data):
    cache_dir, entries, texts, tokenised = three
    encode = Encoder.__call__

    def counted(encoder, documents):
        tokenised.extend(document.text for document in documents)
        return encode(encoder, documents)

    data |= {"datasets": tuple(entries[i] for i in order), "eval_datasets": tuple(entries[i] for i in evaluated)}
    data |= {"validation_split": 0.0 if evaluated or sum(len(texts[i]) for i in order) < 2 else split}
    with mock.patch.object(Encoder, "__call__", counted):
        opened = open_documents(Config(data=DataOptions(**data, cache_dir=str(cache_dir))), tokenizer)
    assert len(tokenised) == len(set(tokenised))  # over all examples

    parts = (opened[0], *opened[1].values())
    everything = [[tokenizer.decode(part.read(i, 0, 99)[0]) for i in range(len(part))] for part in parts]
    wanted = [text + "<|im_end|>" for i in order for text in texts[i]]
    if data["validation_split"]:
        assert Counter(everything[0] + everything[1]) == Counter(wanted)
    else:
        assert everything[0] == wanted and (len(everything) == 2) == bool(evaluated)
        assert everything[1:] in ([], [[text + "<|im_end|>" for i in evaluated for text in texts[i]]])


def test_what_one_entry_needs_leaves_the_others_tokenised(tokenizer, three, tmp_path):
    _, entries, (a, b, c), _ = three
    for options, again in (({}, a + b + c), ({"samples": 1}, b), ({"samples": 1}, [])):
        with mock.patch.object(Encoder, "__call__", autospec=True, side_effect=Encoder.__call__) as encode:
            tokenize((entries[0], replace(entries[1], **options), entries[2]), tokenizer, tmp_path / "cache")
        assert [document.text for call in encode.call_args_list for document in call.args[1]] == again
