"""What an entry's path may be, and which of its samples are read."""

import functools
import http.server
import json
import threading
from pathlib import Path

import datasets
import fsspec
import pyarrow
import pytest
from tiny import byte_tokenizer

from jaxtune.config.schema import Dataset
from jaxtune.data.documents import tokenize
from jaxtune.data.sources import open_source
from jaxtune.errors import UserError


def jsonl(*texts: str) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def texts(path, on_bad_row="error", **options) -> list[str]:
    """The texts of an entry's samples, in order."""

    def report(error: UserError):
        if on_bad_row == "error":
            raise error

    return [sample["text"] for _, sample in open_source(Dataset(path=path, **options)).read(report)]


@pytest.fixture
def folder(tmp_path):
    """Five files: a, b and c in a folder data, d in a folder below it, and one that is hidden."""
    for name in ("a.jsonl", "b.jsonl", "c.json", "sub/d.jsonl", ".hidden.jsonl"):
        path = tmp_path / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(jsonl(path.stem))
    return tmp_path / "data"


@pytest.fixture
def memory(folder):
    """The same files in fsspec's memory, and the URL of their folder."""
    system = fsspec.filesystem("memory")
    system.rm("/", recursive=True)
    system.put(f"{folder}/", "/bucket/data/", recursive=True)
    return "memory://bucket/data"


@pytest.fixture(params=["local", "memory"])
def root(request, folder, memory):
    """Where the five files are."""
    return str(folder) if request.param == "local" else memory


def test_a_file_a_pattern_a_folder_and_a_list_of_them(root):
    assert texts(f"{root}/b.jsonl") == ["b"]
    assert texts(f"{root}/*.jsonl") == ["a", "b"]
    assert texts(f"{root}/**/*.jsonl") == ["a", "b", "d"]
    assert texts(root) == texts(f"{root}/") == ["a", "b", "c", "d"]
    assert texts((f"{root}/sub", f"{root}/a.jsonl")) == ["d", "a"]
    assert texts(root, glob="*.jsonl") == ["a", "b"]
    assert texts(root, glob=("sub/*", "c*")) == ["c", "d"]


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
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "saved")
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
    monkeypatch.setitem(__import__("sys").modules, "s3fs", None)
    with pytest.raises(UserError, match=wrong):
        texts(url)


def test_a_line_that_goes_dead_is_never_skipped(memory, monkeypatch):
    class Dead(fsspec.implementations.memory.MemoryFile):
        def readinto(self, _):
            raise RuntimeError("the line went dead")

    monkeypatch.setattr(
        fsspec.implementations.memory.MemoryFileSystem, "_open", lambda self, path, **_: Dead(self, path)
    )
    for on_bad_row in ("error", "skip"):
        with pytest.raises(UserError, match="a.jsonl cannot be read to its end: the line went dead"):
            texts(f"{memory}/a.jsonl", on_bad_row)


@pytest.fixture
def web(folder):
    """A web server that serves the five files."""
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
    before = open_source(Dataset(path=f"{web}/a.jsonl")).identity
    (folder / "a.jsonl").write_bytes(jsonl("changed"))
    assert open_source(Dataset(path=f"{web}/a.jsonl")).identity != before
    with pytest.raises(UserError, match=f"no such file or folder: {web}/none.jsonl"):
        texts(f"{web}/none.jsonl")


def test_the_format_of_an_oddly_named_file_is_named(tmp_path):
    (tmp_path / "part-0001").write_bytes(jsonl("one"))
    (tmp_path / "table.dat").write_text("text\none\n")
    (tmp_path / "list").write_text(json.dumps([{"text": "one"}]))
    datasets.Dataset.from_list([{"text": "one"}]).to_parquet(tmp_path / "columns")
    for name, ds_type in (("part-0001", "json"), ("table.dat", "csv"), ("list", "json"), ("columns", "parquet")):
        assert texts(f"{tmp_path}/{name}", ds_type=ds_type) == ["one"]
    (tmp_path / "columns").unlink(), (tmp_path / "list").unlink(), (tmp_path / "table.dat").unlink()
    (tmp_path / "part-0002").write_bytes(jsonl("two"))
    assert texts(str(tmp_path), ds_type="json") == ["one", "two"]


def test_a_path_in_the_home_folder(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder))
    assert texts("~/a.jsonl") == ["a"] and texts("~/*.jsonl") == ["a", "b"]
    assert Path("~").expanduser() == folder


def test_the_files_of_a_hub_dataset_can_be_chosen(monkeypatch):
    asked = []
    monkeypatch.setattr(
        datasets,
        "load_dataset",
        lambda *args, **kwargs: (asked.append(kwargs), datasets.Dataset.from_list([{"text": "one"}]))[1],
    )
    assert texts("someone/texts", glob="en/*.parquet") == ["one"]
    assert asked == [{"split": "train", "revision": None, "data_files": ["en/*.parquet"]}]
