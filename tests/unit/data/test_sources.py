"""The paths that an entry may have, and the samples that are read from it."""

import functools
import http.server
import json
import os
import sys
import threading
from pathlib import Path

import datasets
import fsspec
import numpy as np
import pyarrow
import pytest
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem
from tiny import byte_tokenizer

from jaxtune import config_of
from jaxtune.config.schema import Dataset
from jaxtune.config.sources import in_memory
from jaxtune.data.cache.documents import tokenize
from jaxtune.data.reading.sources import open_source
from jaxtune.data.reading.user_files import fingerprint
from jaxtune.errors import UserError


def jsonl(*texts: str) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def texts(path, on_bad_row="error", **options) -> list[str]:
    """Return the texts of an entry's samples, in order."""

    def report(error: UserError):
        if on_bad_row == "error":
            raise error

    return [sample["text"] for _, sample in open_source(Dataset(path=path, **options)).read(report)]


@pytest.fixture
def folder(tmp_path):
    """Write five files: a, b and c in a folder data, d in a subfolder, and a hidden one."""
    for name in ("a.jsonl", "b.jsonl", "c.json", "sub/d.jsonl", ".hidden.jsonl"):
        path = tmp_path / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(jsonl(path.stem))
    return tmp_path / "data"


@pytest.fixture
def memory(folder):
    """Copy the files to fsspec's memory; return the URL of their folder."""
    system = fsspec.filesystem("memory")
    system.rm("/", recursive=True)
    system.put(f"{folder}/", "/bucket/data/", recursive=True)
    return "memory://bucket/data"


@pytest.fixture(params=["local", "memory"])
def root(request, folder, memory):
    """Return the place of the five files."""
    return str(folder) if request.param == "local" else memory


def test_a_file_a_pattern_a_folder_and_a_list_of_them(root):
    assert texts(f"{root}/b.jsonl") == ["b"]
    assert texts(f"{root}/*.jsonl") == ["a", "b"]
    assert texts(f"{root}/**/*.jsonl") == ["a", "b", "d"]
    assert texts(root) == texts(f"{root}/") == ["a", "b", "c", "d"]
    assert texts((f"{root}/sub", f"{root}/a.jsonl")) == ["d", "a"]
    assert texts(root, glob="*.jsonl") == ["a", "b"]
    assert texts(root, glob=("sub/*", "c*")) == ["c", "d"]


def test_texts_next_to_files_of_samples_are_not_read_and_counted(folder, caplog):
    for name in ("README.txt", "x.txt", "sub/y.txt"):
        (folder / name).write_text("text")
    assert texts(str(folder)) == ["a", "b", "c", "d"]
    assert "4 files of samples are read, but not 2 text files next to them" in caplog.text


def test_a_byte_order_mark_is_no_part_of_a_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbffrom Windows")
    assert texts(str(tmp_path)) == ["from Windows"]


@pytest.mark.parametrize(
    "path, options, wrong",
    [
        ("none.jsonl", {}, "no such file or folder: .*/none.jsonl"),
        ("*.csv", {}, r"no such file or folder: .*/\*.csv"),
        ("", {"glob": ("*.csv", "x")}, r"no file in .* matches \('\*.csv', 'x'\)"),
        ("a.jsonl", {"glob": "*"}, "glob = '\\*' has no effect: .*/a.jsonl names the files"),
        ("*.jsonl", {"split": "test"}, "split = 'test' has no effect: .* names the files"),
        ("a.jsonl", {"subset": "en"}, "subset = 'en' has no effect: .* not on the hub"),
    ],
)
def test_what_is_not_there_or_has_no_effect_is_named(root, path, options, wrong):
    with pytest.raises(UserError, match=wrong):
        texts(f"{root}/{path}" if path else root, **options)


def test_one_that_is_missing_in_a_list_is_named(folder):
    with pytest.raises(UserError, match="no such file or folder: some/hub-id"):
        texts((f"{folder}/a.jsonl", "some/hub-id"))


def test_a_url_of_any_kind_of_file_split_or_saved_dataset(tmp_path, memory):
    system = fsspec.filesystem("memory")
    rows = [{"text": "one"}, {"text": "two"}]
    parts = {name: datasets.Dataset.from_list(part) for name, part in (("train", rows), ("test", rows[1:]))}
    parts["train"].to_parquet(tmp_path / "a.parquet")
    with pyarrow.output_stream(str(tmp_path / "a.jsonl.gz"), compression="detect") as file:
        file.write(jsonl("one", "two"))
    for name in ("a.parquet", "a.jsonl.gz"):
        system.put(str(tmp_path / name), f"/bucket/{name}")
        assert texts(f"memory://bucket/{name}") == ["one", "two"]
        assert texts(f"memory://bucket/{name}", samples=1) == ["one"]
    for split in parts:
        system.pipe(f"/bucket/named/{split}.jsonl", jsonl(split))
    assert texts("memory://bucket/named") == ["train"] and texts("memory://bucket/named", split="test") == ["test"]
    datasets.DatasetDict({**parts}).save_to_disk(tmp_path / "saved")
    system.put(f"{tmp_path}/saved/", "/bucket/saved/", recursive=True)
    assert texts("memory://bucket/saved", split="test") == ["two"]
    with pytest.raises(UserError, match="has no split 'dev'"):
        texts("memory://bucket/saved", split="dev")


def test_a_url_is_read_again_when_its_file_has_changed(tmp_path, memory):
    tokenizer, entry = byte_tokenizer(tmp_path / "tokenizer"), Dataset(path=f"{memory}/a.jsonl")
    assert len(tokenize((entry,), tokenizer, tmp_path / "cache")) == 1
    fsspec.filesystem("memory").pipe("/bucket/data/a.jsonl", jsonl("new", "newer"))
    assert len(tokenize((entry,), tokenizer, tmp_path / "cache")) == 2


@pytest.mark.parametrize(
    "url, wrong",
    [("s3://bucket/a.jsonl", "(?i)install s3fs"), ("ftpx://host/a.jsonl", "cannot be reached: Protocol not known")],
)
def test_a_url_that_needs_a_package_or_is_unknown_says_so(url, wrong, monkeypatch):
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(UserError, match=wrong):
        texts(url)


def test_a_line_that_goes_dead_is_never_skipped(memory, monkeypatch):
    class Dead(MemoryFile):
        def readinto(self, _):
            raise RuntimeError("the line went dead")

    monkeypatch.setattr(MemoryFileSystem, "_open", lambda self, path, **_: Dead(self, path))
    for on_bad_row in ("error", "skip"):
        with pytest.raises(UserError, match="a.jsonl cannot be read to its end: the line went dead"):
            texts(f"{memory}/a.jsonl", on_bad_row)


@pytest.fixture
def web(folder):
    """Serve the five files over HTTP."""
    pytest.importorskip("aiohttp", reason="fsspec reads https through aiohttp")

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_files_on_a_web_server(web, folder):
    assert texts(f"{web}/a.jsonl") == texts(f"{web}/a.jsonl?download=true") == ["a"]
    assert texts(f"{web}/*.jsonl") == ["a", "b"]
    datasets.Dataset.from_list([{"text": "one"}]).to_parquet(folder / "a.parquet")
    assert texts(f"{web}/a.parquet") == ["one"]
    before = open_source(Dataset(path=f"{web}/a.jsonl")).identity
    (folder / "a.jsonl").write_bytes(jsonl("changed"))
    assert open_source(Dataset(path=f"{web}/a.jsonl")).identity != before
    with pytest.raises(UserError, match=f"no such file or folder: {web}/none.jsonl"):
        texts(f"{web}/none.jsonl")


def test_the_format_of_an_oddly_named_file_is_named(tmp_path):
    (tmp_path / "part-0001").write_bytes(jsonl("one"))
    (tmp_path / "table.dat").write_text("text\none\n")
    (tmp_path / "tabs").write_text("text\tlang\none\ten\n")
    (tmp_path / "list").write_text(json.dumps([{"text": "one"}]))
    datasets.Dataset.from_list([{"text": "one"}]).to_parquet(tmp_path / "columns")
    for name, ds_type in (
        ("part-0001", "json"),
        ("table.dat", "csv"),
        ("tabs", "tsv"),
        ("list", "json"),
        ("columns", "parquet"),
    ):
        assert texts(f"{tmp_path}/{name}", ds_type=ds_type) == ["one"]
    assert texts(f"{tmp_path}/list", ds_type="text") == ['[{"text": "one"}]']
    (tmp_path / "part-0002").write_bytes(jsonl("two"))
    assert texts(f"{tmp_path}/part-*", ds_type="json") == texts(str(tmp_path), glob="part-*", ds_type="json")
    assert texts(f"{tmp_path}/part-*", ds_type="json") == ["one", "two"]


def test_a_path_in_the_home_folder(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder))
    assert texts("~/a.jsonl") == ["a"] and texts("~/*.jsonl") == ["a", "b"]
    assert Path("~").expanduser() == folder


def test_the_files_of_a_hub_dataset_can_be_chosen(monkeypatch):
    calls = []
    monkeypatch.setattr(
        datasets,
        "load_dataset",
        lambda *args, **kwargs: (calls.append(kwargs), datasets.Dataset.from_list([{"text": "one"}]))[1],
    )
    assert texts("someone/texts", glob="en/*.parquet") == ["one"]
    assert calls == [{"split": "train", "revision": None, "data_files": ["en/*.parquet"]}]


def test_a_part_of_the_samples_is_every_nth(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(jsonl(*"abcdefg"))
    parts = [texts(str(tmp_path / "a.jsonl"), shards=3, shard_idx=i) for i in range(3)]
    assert parts == [["a", "d", "g"], ["b", "e"], ["c", "f"]]
    assert texts(str(tmp_path / "a.jsonl"), shards=3, shard_idx=0, samples=2) == ["a", "d"]


def test_random_tokens_are_made_up(tmp_path):
    tokenizer = byte_tokenizer(tmp_path / "tokenizer")
    entry = Dataset(path="dummy", samples=5, dummy_length=64)
    documents = tokenize((entry,), tokenizer, tmp_path / "cache")
    assert documents.lengths.tolist() == [64] * 5 and documents.targets.tolist() == [63] * 5
    tokens = [documents.read(i, 0, 64)[0] for i in range(5)]
    assert len(np.unique(tokens)) > 128 and not np.array_equal(tokens[0], tokens[1])
    assert documents.notes == ("dummy: tokenized from input_ids, 5 documents of 320 tokens",)


@pytest.fixture
def write_lines(tmp_path):
    """Return a function that writes samples to a file and returns its path."""

    def write(*samples) -> str:
        (tmp_path / "lines.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
        return str(tmp_path / "lines.jsonl")

    return write


def test_columns_that_are_not_selected_are_not_there(write_lines, tmp_path):
    tokenizer = byte_tokenizer(tmp_path / "tokenizer")
    path = write_lines({"input_ids": [1, 2, 3], "attention_mask": [1, 1, 0], "labels": [-100, 2, 3]})

    def trained(**options):
        documents = tokenize((Dataset(path=path, **options),), tokenizer, tmp_path / "cache")
        return documents.lengths.tolist(), documents.targets.tolist()

    assert trained() == ([2], [1])
    assert trained(select_columns=("input_ids", "labels")) == ([3], [2])
    with pytest.raises(UserError, match="select_columns: no sample has 'lables'"):
        trained(select_columns=("input_ids", "lables"))


FUNCTION = """
def to_text(sample):
    if sample["score"] < 0:
        return None
    return {"text": sample["title"] + "!"}

def wrong(sample):
    return sample["score"]
"""


def test_a_function_changes_or_leaves_out_samples(write_lines, tmp_path):
    path = write_lines(*({"title": title, "score": score} for title, score in (("a", 1), ("b", -1), ("c", 1))))
    (tmp_path / "own.py").write_text(FUNCTION)
    assert texts(path, function=f"{tmp_path}/own.py:to_text") == ["a!", "c!"]
    for name, wrong in (
        ("own.py:wrong", r"lines.jsonl:1: .*own.py:wrong: it must return a dict of columns, a text, or None .* not 1"),
        ("own.py:none", "own.py has no function none"),
        ("none.py:to_text", "none.py:to_text': No such file"),
        ("own:to_text", "is not FILE.py:NAME"),
    ):
        with pytest.raises(UserError, match=wrong):
            texts(path, function=f"{tmp_path}/{name}")


def test_a_function_that_fails_is_a_bad_row_that_names_its_line(write_lines, tmp_path):
    path = write_lines({"title": "a", "score": 1}, {"score": 1})
    (tmp_path / "own.py").write_text(FUNCTION)
    with pytest.raises(UserError, match=r"lines.jsonl:2: .*own.py:to_text: KeyError: 'title'"):
        texts(path, function=f"{tmp_path}/own.py:to_text")
    assert texts(path, "skip", function=f"{tmp_path}/own.py:to_text") == ["a!"]


def test_samples_are_read_again_when_a_module_that_the_function_imports_has_changed(tmp_path):
    """Here a module in a package of the user's, which another module imports."""
    (tmp_path / "pack").mkdir()
    (tmp_path / "own.py").write_text(
        "import json, numpy\nfrom pack import inner\ndef to_text(sample):\n    return None"
    )
    (tmp_path / "pack" / "__init__.py").touch()
    (tmp_path / "pack" / "inner.py").write_text("from .deep import END")
    function, keys = f"{tmp_path}/own.py:to_text", set()
    for end in ("!", "?", "?"):
        (tmp_path / "pack" / "deep.py").write_text(f"END = {end!r}")
        keys.add(fingerprint(function, "data: function"))
    assert len(keys) == 2


def test_a_small_file_of_the_same_size_and_time_is_read_again(write_lines, tmp_path):
    tokenizer, keys = byte_tokenizer(tmp_path / "tokenizer"), []
    for text in ("a", "b", "b"):
        entry = Dataset(path=write_lines({"text": text}))
        os.utime(tmp_path / "lines.jsonl", (1e9, 1e9))
        documents = tokenize((entry,), tokenizer, tmp_path / "cache")
        keys.append(documents.key)
    assert keys[0] != keys[1] == keys[2] and "from the cache of 20" in documents.notes[-1]


def test_samples_are_read_again_when_the_file_of_the_function_has_changed(write_lines, tmp_path):
    tokenizer, path = byte_tokenizer(tmp_path / "tokenizer"), write_lines({"title": "a", "score": 1})
    entry = Dataset(path=path, function=f"{tmp_path}/own.py:to_text")
    for written in (FUNCTION, FUNCTION.replace("!", "?")):
        (tmp_path / "own.py").write_text(written)
        documents = tokenize((entry,), tokenizer, tmp_path / "cache")
        assert tokenizer.decode(documents.read(0, 0, 99)[0]) == f"a{'!' if written == FUNCTION else '?'}<|im_end|>"


def test_names_near_one_that_is_not_there_are_told(folder):
    for path in (f"{folder}/aa.jsonl", (f"{folder}/aa.jsonl",)):
        with pytest.raises(UserError, match=r"no such file or folder: .*/aa.jsonl \(near it: .*/a.jsonl"):
            texts(path)


# Datasets given in Python

ROWS = {"text": ["a", "b", None], "n": [1, 2, 3]}


@pytest.mark.parametrize("kind", ["Dataset", "IterableDataset", "DataFrame"])
@pytest.mark.parametrize("form", ["alone", "in a list", "as a path"])
def test_a_dataset_from_python_is_named_by_its_samples(kind, form):
    def given(rows: dict) -> str:
        made = datasets.Dataset.from_dict(rows)
        data = {"DataFrame": made.to_pandas, "IterableDataset": made.to_iterable_dataset}.get(kind, lambda: made)()
        entries = {"alone": data, "in a list": [data], "as a path": {"path": data, "type": "text"}}[form]
        (entry,) = config_of("qwen_lora:my/model", data={"datasets": entries}).data.datasets
        assert entry.type == ("text" if form == "as a path" else "auto")
        return entry.path

    path = given(ROWS)
    source = open_source(Dataset(path=path))
    assert list(source.read(pytest.fail)) == [
        (f"{path} row {i}", {"text": text, "n": n}) for i, (text, n) in enumerate(zip(*ROWS.values(), strict=True))
    ]
    assert given(ROWS) == path, "another process would give it the same name"
    assert open_source(Dataset(path=given(ROWS | {"n": [1, 2, 4]}))).identity != source.identity
    assert open_source(Dataset(path=path), streaming=True).identity == path
    if kind == "IterableDataset":
        assert source.identity != path, "a cache of its first samples is not a cache of all"


def stream_of(*last: str) -> datasets.IterableDataset:
    """Return a stream that differs only in its last samples, beyond the first 1,000, which name it."""
    return datasets.IterableDataset.from_generator(lambda: ({"text": text} for text in ("a",) * 1000 + last))


def path_of(data) -> str:
    return str(config_of("qwen_lora:my/model", data={"datasets": data}).data.datasets[0].path)


def test_another_stream_with_the_same_beginning_is_tokenised_anew(tmp_path):
    tokenizer, cache, stream = byte_tokenizer(tmp_path), tmp_path / "cache", stream_of("b")
    first = tokenize((Dataset(path=path_of(stream)),), tokenizer, cache)
    second = tokenize((Dataset(path=path_of(stream_of("c"))),), tokenizer, cache)
    assert len(first) == len(second) == 1001 and first.key != second.key
    source = open_source(Dataset(path=path_of(stream)))
    assert source.identity == open_source(Dataset(path=path_of(stream))).identity, "the same stream is known"


def test_streams_with_the_same_beginning_are_refused_in_one_config():
    """Otherwise the second would replace the first."""
    one, other = stream_of("b"), stream_of("c")
    with pytest.raises(UserError, match="two IterableDatasets begin with the same 1,000 samples"):
        config_of("qwen_lora:my/model", data={"datasets": one, "eval_datasets": other})
    again = stream_of("d")  # in another config it is allowed
    config = config_of("qwen_lora:my/model", data={"datasets": again})
    problems = []
    rows = [row["text"] for _, row in open_source(config.data.datasets[0]).read(problems.append)]
    assert rows[-1] == "d" and not problems


def test_a_stream_from_python_says_by_what_it_is_known():
    log = []
    open_source(Dataset(path=path_of(stream_of("b"))), streaming=True, say=log.append)
    open_source(Dataset(path=path_of(datasets.Dataset.from_dict(ROWS))), streaming=True, say=log.append)
    assert len(log) == 1 and "only its first 1,000 samples are compared when a run continues" in log[0]


def test_a_dataset_from_python_is_read_once_and_then_only_where_it_was_given(tmp_path, monkeypatch):
    """A resumed run in another process has its tokens from the cache, but not its samples."""
    made = datasets.Dataset.from_dict({"text": ["one", "two"]})
    path = config_of("qwen_lora:my/model", data={"datasets": made}).data.datasets[0].path
    tokenizer, cache = byte_tokenizer(tmp_path), tmp_path / "cache"
    first = tokenize((Dataset(path=path),), tokenizer, cache)
    monkeypatch.setattr(in_memory, "_REGISTRY", {})
    assert tokenize((Dataset(path=path),), tokenizer, cache).key == first.key
    with pytest.raises(UserError, match=r"data: python:Dataset-\w+ was given from Python, and this process does not"):
        tokenize((Dataset(path=path, samples=1),), tokenizer, cache)
    with pytest.raises(UserError, match="split = 'test' has no effect: it is a dataset from Python"):
        open_source(Dataset(path=path, split="test"))


def test_what_python_gives_that_is_no_dataset_is_refused():
    several = datasets.DatasetDict(train=datasets.Dataset.from_dict({"text": ["a"]}))
    with pytest.raises(UserError, match=r"a DatasetDict has several splits: pass one split, such as data\['train'\]"):
        config_of("qwen_lora:my/model", data={"datasets": several})
    mixed = datasets.Dataset.from_dict({"text": ["a"]}).to_pandas().assign(n=[object()])
    with pytest.raises(UserError, match="the DataFrame cannot be read: .*object"):
        config_of("qwen_lora:my/model", data={"datasets": mixed})
