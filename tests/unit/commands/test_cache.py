"""`jaxtune cache`: the entries it lists, and those it removes."""

import fcntl
import json
import os
import socket
import time

import pytest
from runs import call
from tiny import byte_tokenizer

from jaxtune.config.schema import Dataset
from jaxtune.data.cache.documents import tokenize

TEN_DAYS_AGO = time.time() - 10 * 86_400


@pytest.fixture
def cache(tmp_path):
    """Write a cache of two entries; the first was last used ten days ago."""
    tokenizer = byte_tokenizer(tmp_path / "tokenizer")
    for name in ("old", "new"):
        (tmp_path / f"{name}.txt").write_text(name)
        tokenize((Dataset(path=str(tmp_path / f"{name}.txt")),), tokenizer, tmp_path / "cache")
        if name == "old":
            (summary,) = (tmp_path / "cache").glob("*/summary.json")
            os.utime(summary, (TEN_DAYS_AGO, TEN_DAYS_AGO))
    return tmp_path / "cache"


def folders(cache) -> int:
    return sum(path.is_dir() for path in cache.iterdir())


def test_entries_are_listed_with_size_and_origin_the_last_used_at_the_end(cache):
    first, second = call("jaxtune.cache", f"--folder={cache}").splitlines()
    assert "old.txt: text from text, 1 document" in first and "new.txt" in second
    assert "MB  last used" in first
    assert folders(cache) == 2


def test_what_is_unused_goes_with_its_lock_and_the_rest_stays(cache, tmp_path):
    removed, rest = call("jaxtune.cache", f"--folder={cache}", "--unused_days=5").splitlines()
    assert removed.startswith("removed") and "old.txt" in removed and "new.txt" in rest
    assert folders(cache) == 1 and len(list(cache.glob("*.lock"))) == 1
    # Reading counts as use.
    (summary,) = cache.glob("*/summary.json")
    os.utime(summary, (TEN_DAYS_AGO, TEN_DAYS_AGO))
    tokenize((Dataset(path=str(tmp_path / "new.txt")),), byte_tokenizer(tmp_path / "tokenizer"), cache)
    call("jaxtune.cache", f"--folder={cache}", "--unused_days=5")
    assert folders(cache) == 1


def test_a_folder_of_another_version_is_said_to_be_and_goes_too(cache):
    (cache / "before").mkdir()
    (cache / "before" / "summary.json").write_text(json.dumps({"key": "k", "skipped": 0, "notes": ["a.txt", "b.txt"]}))
    entry = "a.txt; b.txt (written by another version of jaxtune: this one does not read it)"
    *current, before = call("jaxtune.cache", f"--folder={cache}").splitlines()
    assert before.endswith(entry) and not any("version" in line for line in current)
    call("jaxtune.cache", f"--folder={cache}", "--unused_days=0")
    assert folders(cache) == 0


def test_a_folder_that_is_damaged_is_said_to_be_and_goes_too(cache):
    next(cache.glob("*/summary.json")).write_text("{")
    assert "damaged: summary.json cannot be read" in call("jaxtune.cache", f"--folder={cache}")
    call("jaxtune.cache", f"--folder={cache}", "--unused_days=0")
    assert folders(cache) == 0


def test_what_is_being_written_stays(cache):
    unfinished, elsewhere = f"abc.{socket.gethostname()}.1.tmp", "abc.another-host.1.tmp"
    (cache / unfinished).mkdir()
    (cache / elsewhere).mkdir()
    with (cache / "abc.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        call("jaxtune.cache", f"--folder={cache}", "--unused_days=0")
        assert sorted(path.name for path in cache.iterdir()) == sorted([elsewhere, unfinished, "abc.lock"])
    call("jaxtune.cache", f"--folder={cache}", "--unused_days=0")
    assert sorted(path.name for path in cache.iterdir()) == [elsewhere, "abc.lock"], "another host may still write it"


def test_a_cache_that_is_not_there_is_said(tmp_path):
    assert "no such folder" in call("jaxtune.cache", f"--folder={tmp_path / 'none'}", code=2)
