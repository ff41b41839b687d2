"""Tokenising in parallel, in parts, on several machines, or only from the cache gives the same documents."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from tiny import byte_tokenizer

from jaxtune.cache import main as cache_command
from jaxtune.config.schema import Dataset
from jaxtune.data.cache import documents
from jaxtune.data.cache import parts as module
from jaxtune.data.cache.documents import prepare_shard, tokenize
from jaxtune.data.cache.tokenising import Tokeniser
from jaxtune.data.cache.workers import ordered_map
from jaxtune.errors import UserError


def chat(i: int) -> dict:
    answer = {"role": "assistant", "content": f"answer {i} " * (1 + i % 5)}
    return {"messages": [{"role": "user", "content": f"ask {i}"}, answer], **({"id": i} if i == 7 else {})}


BAD = {5: "{not JSON", 13: '{"text": "of another type"}', 20: '{"messages": [{"role": "user", "content": "?"}]}'}

BLOCKS = 10  # in the file below, with the limits of `small`


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def entry(tmp_path):
    """Write conversations; three lines are bad."""
    lines = [BAD.get(i) or json.dumps(chat(i)) for i in range(40)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    return Dataset(path=str(tmp_path / "a.jsonl"))


@pytest.fixture
def small(monkeypatch):
    """Set blocks of four samples and parts of two blocks; return the blocks that this process tokenised."""
    blocks, call = [], Tokeniser.__call__
    monkeypatch.setattr(module, "_BLOCK_SAMPLES", 4)
    monkeypatch.setattr(module, "_BLOCK_SIZE", 800)
    monkeypatch.setattr(module, "_PART_SIZE", 200)
    monkeypatch.setattr(Tokeniser, "__call__", lambda self, items: (blocks.append(items), call(self, items))[1])
    return blocks


def files(cache: Path) -> dict[str, bytes]:
    [folder] = (path for path in cache.iterdir() if path.is_dir())
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def expected(entry, tokenizer, tmp_path):
    """Return the files that one process writes in one go, skipping bad lines."""
    documents = tokenize((entry,), tokenizer, tmp_path / "whole", "skip")
    assert documents.skipped_samples == 3 and "3 samples skipped" in documents.losses[0]
    assert documents.losses[1].endswith("2 columns are not used: 'id', 'text'")
    return files(tmp_path / "whole")


@pytest.mark.parametrize("processes", [1, 2])
def test_processes_and_parts_make_the_same_bytes(entry, tokenizer, tmp_path, expected, small, processes):
    tokenize((entry,), tokenizer, tmp_path / "cache", "skip", num_proc=processes)
    assert files(tmp_path / "cache") == expected
    assert len(small) == (
        1 if processes == 2 else BLOCKS
    )  # the first block decides the type, the others are tokenised elsewhere


def test_of_a_classifier_too(tokenizer, tmp_path, small):
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": f"t {i}", "label": i % 3}) for i in range(30)))
    entry = Dataset(path=str(tmp_path / "a.jsonl"), type="classification")
    parts = [
        tokenize((entry,), tokenizer, tmp_path / str(count), labels=("a", "b", "c"), num_proc=count).parts[0]
        for count in (1, 2)
    ]
    assert parts[0].key == parts[1].key and parts[1].values["label"].tolist() == [i % 3 for i in range(30)]


def test_the_first_mistake_of_the_file_is_the_error_whoever_tokenises(entry, tokenizer, tmp_path, small):
    errors = []
    for processes in (1, 2):
        with pytest.raises(UserError) as error:
            tokenize((entry,), tokenizer, tmp_path / "cache", num_proc=processes)
        errors.append(str(error.value))
    assert errors[0] == errors[1] and "a.jsonl:6: not JSON" in errors[0]
    lines = Path(entry.path).read_text().splitlines()
    Path(entry.path).write_text("\n".join([lines[20], *lines[6:13], *lines[14:]]))
    for processes in (1, 2):  # all samples are read and counted
        with pytest.raises(UserError, match=r"2 samples cannot be trained on; the first: .*a.jsonl:1: "):
            tokenize((entry,), tokenizer, tmp_path / "cache", num_proc=processes)


def test_a_run_that_was_killed_goes_on_after_its_last_part(
    entry, tokenizer, tmp_path, expected, small, monkeypatch, caplog
):
    call = Tokeniser.__call__

    def killed(self, items):
        if len(small) == 6:
            raise KeyboardInterrupt
        return call(self, items)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Tokeniser, "__call__", killed)
        tokenize((entry,), tokenizer, tmp_path / "cache", "skip")
    small.clear()
    with caplog.at_level("INFO", "jaxtune"):
        tokenize((entry,), tokenizer, tmp_path / "cache", "skip")
    assert files(tmp_path / "cache") == expected
    assert 0 < len(small) < BLOCKS and "continuing with 3 parts" in caplog.text


def test_machines_make_a_shard_each_and_the_run_joins_them(entry, tokenizer, tmp_path, expected, small):
    cache = tmp_path / "cache"
    [line] = prepare_shard((entry,), tokenizer, cache, (1, 3), "skip")
    assert "parts of shard 1/3; of all 6 parts 2 are there" in line
    for shard in ((0, 3), (2, 3), (2, 3)):
        [line] = prepare_shard((entry,), tokenizer, cache, shard, "skip")
    assert "of all 6 parts 6 are there" in line and len(small) == BLOCKS
    tokenize((entry,), tokenizer, cache, "skip")
    assert files(cache) == expected and len(small) == BLOCKS
    assert "is whole in the cache already" in prepare_shard((entry,), tokenizer, cache, (0, 3), "skip")[0]


def test_shards_are_joined_on_a_file_system_without_locks_too(entry, tokenizer, tmp_path, expected, small, monkeypatch):
    def no_locks(*_):
        raise OSError("no locks here")

    monkeypatch.setattr(documents.fcntl, "flock", no_locks)
    for shard in ((0, 2), (1, 2)):
        prepare_shard((entry,), tokenizer, tmp_path / "cache", shard, "skip")
    tokenize((entry,), tokenizer, tmp_path / "cache", "skip")
    assert files(tmp_path / "cache") == expected and len(small) == BLOCKS


def test_parts_that_nobody_goes_on_with_are_removed(entry, tokenizer, tmp_path, small, capsys):
    cache = tmp_path / "cache"
    prepare_shard((entry,), tokenizer, cache, (0, 2), "skip")
    [parts] = cache.glob("*.parts")
    assert cache_command([f"--folder={cache}", "--unused_days=1"]) == 0 and parts.exists()
    os.utime(parts, (0, 0))
    assert cache_command([f"--folder={cache}", "--unused_days=1"]) == 0 and not list(cache.iterdir())


def test_the_cache_alone_is_enough(entry, tokenizer, tmp_path):
    cache = tmp_path / "cache"
    whole = tokenize((entry,), tokenizer, cache, "skip")
    Path(entry.path).unlink()
    with pytest.raises(UserError, match="no such file"):
        tokenize((entry,), tokenizer, cache, "skip")
    documents = tokenize((replace(entry, weight=2.0),), tokenizer, cache, "skip", cache_only=True)
    assert documents.key == whole.key and "its source was not read" in documents.notes[-1]
    for changed in (replace(entry, samples=3), replace(entry, path="b.jsonl")):
        with pytest.raises(UserError, match="cache_only: .* holds nothing made from .* with these options"):
            tokenize((changed,), tokenizer, cache, "skip", cache_only=True)


def test_of_a_source_that_changed_the_cache_alone_has_what_was_made_last(tokenizer, tmp_path):
    file, cache, keys = tmp_path / "a.txt", tmp_path / "cache", []
    for number, text in enumerate(("one", "the second")):
        file.write_text(text)
        keys.append(tokenize((Dataset(path=str(file)),), tokenizer, cache).key)
        for made in cache.glob("*/offsets.npy"):
            os.utime(made, (number, number)) if made.stat().st_mtime > 1 else None
    file.unlink()
    documents = tokenize((Dataset(path=str(file)),), tokenizer, cache, cache_only=True)
    assert documents.key == keys[1] != keys[0] and "1 older ones are not used" in documents.notes[-1]


def test_processes_answer_in_order_know_nothing_of_jax_and_are_missed_when_they_end():
    assert list(ordered_map(eval, (f"{i} * 2" for i in range(50)), 3)) == list(range(0, 100, 2))
    loaded = "[__import__('jaxtune.data.cache.tokenising'), 'jax' in __import__('sys').modules][1]"
    assert list(ordered_map(eval, [loaded], 1)) == [False]
    results = ordered_map(eval, ["1", "__import__('os')._exit(3)", "2"], 2)
    assert next(results) == 1
    with pytest.raises(UserError, match="a process that tokenises ended with code 3"):
        list(results)
