"""A mirror is consistent whenever the run is cut off, and restores the run on another machine."""

import contextlib
import itertools
import json
import os
import re
import socket
import sys
import threading
import time
import uuid
from functools import partial
from unittest import mock

import jax
import jax.numpy as jnp
import pytest

from jaxtune.checkpoint import CheckpointManager, manifest
from jaxtune.checkpoint.mirror import Mirror
from jaxtune.checkpoint.storage import RemoteFolder, check_unused, open_folder, upload
from jaxtune.errors import UserError

RECORDS = ("config.json", "metrics.jsonl")


class Killed(BaseException):
    """An exception that only `finally` clauses see."""


@pytest.fixture(params=["memory", "file"])
def url(request, tmp_path):
    return f"memory://{uuid.uuid4()}/mirrors/run" if request.param == "memory" else f"file://{tmp_path}/mirrors/run"


def state_of(step):
    return {"weight": jnp.arange(step, step + 50, dtype=jnp.float32), "count": jnp.int32(step)}


def restore(manager):
    """Restore the newest checkpoint, check its arrays, and return its (step, host)."""
    wanted = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state_of(0))
    checkpoint = manager.restore(wanted)
    assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), checkpoint.state, state_of(checkpoint.step)))
    return checkpoint.step, checkpoint.host


def run_of(folder, url, keep_last=2):
    """Return the mirror of the run in a folder, and the manager of its checkpoints."""
    folder.mkdir(exist_ok=True)
    mirror = Mirror(open_folder(url, "ckpt.mirror"), folder, RECORDS)
    return mirror, CheckpointManager(folder / "checkpoints", keep_last, mirror)


def save(manager, step):
    manager.save(step, state_of(step), {"row": step})
    manager.wait(final=True)


def test_the_newest_checkpoints_are_there_and_come_back_with_the_records(url, tmp_path):
    mirror, manager = run_of(tmp_path / "here", url)
    for step in range(1, 5):
        (tmp_path / "here" / "metrics.jsonl").write_text(f"up to {step}")
        save(manager, step)
        assert mirror.wait() is None
        assert mirror.steps() == manager.steps() == [*range(max(1, step - 1), step + 1)]
    assert not [name for name in mirror.remote.names() if "partial" in name or "can-write" in name]
    elsewhere, fetched = run_of(tmp_path / "there", url)
    assert elsewhere.fetch(None) == 4
    assert (tmp_path / "there" / "metrics.jsonl").read_text() == "up to 4"
    assert restore(fetched) == (4, {"row": 4})
    save(fetched, 5)
    assert elsewhere.wait() is None and elsewhere.steps() == [4, 5]
    assert elsewhere.fetch(4) == 4
    with pytest.raises(UserError, match=r"mirrors/run has no checkpoint of step 3, only of \[4, 5\]"):
        elsewhere.fetch(3)
    elsewhere.clear()
    assert elsewhere.steps() == [] and elsewhere.fetch(None) is None


def test_half_a_copy_is_never_taken_for_a_checkpoint(url, tmp_path, monkeypatch):
    """The run is killed at each file in turn, half copied; the next start completes the copy."""
    mirror, manager = run_of(tmp_path / "here", url)
    save(manager, 1)
    assert mirror.wait() is None
    put, write = RemoteFolder.put, RemoteFolder.write
    manager = CheckpointManager(tmp_path / "here" / "checkpoints")
    save(manager, 2)
    for survived in itertools.count():
        left = itertools.count(survived, -1)

        def cut_off(remote, file, name, left=left):
            if next(left) == 0:
                half = tmp_path / "half"
                half.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
                put(remote, half, name)
                raise Killed
            put(remote, file, name)

        def not_begun(remote, name, content, left=left):
            if next(left) == 0:
                raise Killed
            write(remote, name, content)

        mirror = Mirror(open_folder(url, "ckpt.mirror"), tmp_path / "here", RECORDS)
        with monkeypatch.context() as patch:
            patch.setattr(RemoteFolder, "put", cut_off)
            patch.setattr(RemoteFolder, "write", not_begun)
            mirror.update()
            try:
                mirror.wait()
                break
            except Killed:
                assert mirror.steps() == [1]
                if survived % 5 == 0:
                    elsewhere, fetched = run_of(tmp_path / f"after-{survived}", url)
                    assert elsewhere.fetch(None) == 1
                    assert restore(fetched) == (1, {"row": 1})
    assert survived > 5 and mirror.steps() == [1, 2]
    assert run_of(tmp_path / "there", url)[0].fetch(None) == 2


def test_a_copy_that_fails_is_a_warning_and_the_next_save_makes_it(url, tmp_path, monkeypatch):
    warned = mock.Mock()
    monkeypatch.setattr("jaxtune.checkpoint.mirror.logger.warning", warned)
    mirror, manager = run_of(tmp_path / "here", url)
    with monkeypatch.context() as patch:
        patch.setattr(RemoteFolder, "put", lambda *_: (_ for _ in ()).throw(ConnectionError("the line\nis cut")))
        save(manager, 1)
        warning = f"checkpoint 1 was not copied to {mirror.remote.url}: the line is cut"
        assert mirror.wait() == warning
    warned.assert_called_once_with("%s; the next save tries again", warning)
    save(manager, 2)
    assert mirror.wait() is None and mirror.steps() == [1, 2]


def test_what_is_being_copied_stays_until_it_is_and_no_longer(tmp_path, monkeypatch):
    """If saving is faster than copying, the checkpoints between are not copied."""
    mirror, manager = run_of(tmp_path / "here", f"file://{tmp_path}/mirror", keep_last=1)
    begun, go_on, put, copied = threading.Event(), threading.Event(), RemoteFolder.put, set()

    def slow(remote, file, name):
        copied.add(name.split("/")[1])
        begun.set()
        assert go_on.wait(60)
        put(remote, file, name)

    monkeypatch.setattr(RemoteFolder, "put", slow)
    save(manager, 1)
    assert begun.wait(60)
    for step in (2, 3, 4):
        save(manager, step)
    assert manager.steps() == [1, 4]
    go_on.set()
    assert mirror.wait() is None
    assert mirror.steps() == manager.steps() == [4] and copied == {"1", "4"}


def test_damage_on_either_side_is_noticed(url, tmp_path):
    mirror, manager = run_of(tmp_path / "here", url)
    for step in (1, 2):
        save(manager, step)
    assert mirror.wait() is None
    names = [name for name in mirror.remote.names() if name.endswith("host.json")]
    for name in sorted(names, reverse=True):
        elsewhere, _ = run_of(tmp_path / f"with-{len(list(tmp_path.iterdir()))}", url)
        content = bytearray(mirror.remote.read(name))
        content[len(content) // 2] ^= 1
        mirror.remote.write(name, bytes(content))
        if name.startswith("checkpoints/2"):
            assert elsewhere.fetch(None) == 1
        else:
            with pytest.raises(UserError, match="all checkpoints in .*mirrors/run are damaged"):
                elsewhere.fetch(None)
            assert not list((elsewhere._run / "checkpoints").iterdir())
    save(manager, 3)
    (tmp_path / "here" / "checkpoints" / "3" / "host.json").write_text("{}")
    fresh = Mirror(mirror.remote, tmp_path / "here", RECORDS)
    fresh.clear()
    fresh.update()
    assert (
        "checkpoint 3 was not copied" in (why := str(fresh.wait())) and "it is damaged: host.json: has 2 bytes" in why
    )
    assert fresh.steps() == [2]


@pytest.mark.parametrize(
    "name", ["../../../x", "{tmp}/x", "a/{tmp}/x", "a//x", "./x", "a/..", "", "..\\x", "C:\\x", "C:/x", "x\0", "x\n"]
)
def test_a_manifest_cannot_reach_out_of_its_folder(name, tmp_path):
    """An absolute name would reach a file outside; the mirror lists it as a file of the checkpoint as well."""
    name = name.format(tmp=tmp_path)
    mirror, _ = run_of(tmp_path / "here", f"file://{tmp_path}/mirror")
    file_in_mirror, content = f"checkpoints/1/{name}", json.dumps({"files": {name: {"size": 1, "sha256": ""}}})
    mirror.remote.write("checkpoints/1/manifest.json", content.encode())
    with (
        mock.patch.object(RemoteFolder, "sizes", lambda *_: {file_in_mirror: 1, "checkpoints/1/manifest.json": 1}),
        mock.patch.object(RemoteFolder, "get", lambda *_: pytest.fail("fetched")),
        pytest.raises(UserError, match="damaged"),
    ):
        mirror.fetch(None)
    (tmp_path / "manifest.json").write_text(content)
    assert manifest.verify(tmp_path) == [
        f"manifest.json: cannot be read ({name!r} is not the name of a file in a checkpoint)"
    ]


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("s3://bucket/runs", "ckpt.mirror=s3://bucket/runs: Install s3fs to access S3; pip install 'jaxtune[s3]'"),
        ("gs://bucket/runs", "gcsfs.*; pip install 'jaxtune.gcs.'"),
        ("s4://bucket", "nothing can be written there: Protocol not known: s4"),
        ("file:///proc/runs", "nothing can be written there: "),
        ("http://127.0.0.1:9/runs", "nothing can be written there: "),
    ],
)
def test_a_url_that_cannot_be_written_to_is_refused(url, said, monkeypatch):
    for package in ("s3fs", "gcsfs"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=said.replace("[s3]", ".s3.")):
        open_folder(url, "ckpt.mirror")


def test_an_upload_is_marked_whole_last_and_leaves_nothing_older(url, tmp_path, monkeypatch):
    for name in ("README.md", "a.safetensors", "sub/b.json"):
        (tmp_path / "out" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "out" / name).write_text(name)
    remote = open_folder(url, "--output")
    remote.write("a-00001.safetensors", b"older")
    remote.write("README.md", b"older")
    with monkeypatch.context() as patch:
        patch.setattr(RemoteFolder, "put", lambda *_: (_ for _ in ()).throw(OSError("full")))
        with pytest.raises(UserError, match="mirrors/run: the copy is incomplete: full"):
            upload(tmp_path / "out", remote, last="README.md", mark="unfinished")
    assert remote.names() == ["unfinished"]
    upload(tmp_path / "out", remote, last="README.md", mark="unfinished")
    assert {name: remote.read(name).decode() for name in remote.names()} == {
        name: name for name in ("README.md", "a.safetensors", "sub/b.json")
    }


def test_of_two_uploads_to_one_folder_one_is_refused(url, tmp_path, monkeypatch):
    """The second upload is refused before it changes anything; if it has looked too early, the first one is."""
    (tmp_path / "out").mkdir()
    for name in ("README.md", "a.safetensors", "b.json"):
        (tmp_path / "out" / name).write_text(name)
    remote, put, put_by_second = open_folder(url, "--output"), RemoteFolder.put, []
    copy = partial(upload, tmp_path / "out", remote, last="README.md", mark="unfinished")

    def refused(remote, file, name):
        with pytest.raises(
            UserError, match=rf"run is in use: process {os.getpid()} on host .* Wait for it, stop it, or"
        ):
            copy()
        put(remote, file, name)

    monkeypatch.setattr(RemoteFolder, "put", refused)
    copy()
    assert sorted(remote.names()) == ["README.md", "a.safetensors", "b.json"]

    def overtaken(remote, file, name):
        put(remote, file, name)
        put_by_second.append(name)
        if len(put_by_second) == 1:
            with monkeypatch.context() as patch:
                patch.setattr("jaxtune.checkpoint.storage.check_unused", lambda *_: None)
                copy()

    monkeypatch.setattr(RemoteFolder, "put", overtaken)
    with pytest.raises(UserError, match="run is in use: another process is writing to it"):
        copy()
    assert len(put_by_second) == 1 + 3 and sorted(remote.names()) == ["README.md", "a.safetensors", "b.json"]


@pytest.mark.parametrize(
    ("holder", "free"),
    [
        ({"host": "elsewhere", "time": -1}, False),
        ({"host": "elsewhere", "time": -601}, True),
        ({"host": socket.gethostname(), "process": 2**22 + 1}, True),  # higher than Linux gives
    ],
    ids=["another host's", "silent for ten minutes", "ended here"],
)
def test_an_upload_that_was_killed_holds_its_folder_no_longer_than_it_can_live(holder, free, url):
    remote = open_folder(url, "--output")
    now = {"process": os.getpid(), "id": "1"} | holder | {"time": time.time() + holder.get("time", 0)}
    remote.write("mark", json.dumps(now).encode())
    with contextlib.nullcontext() if free else pytest.raises(UserError, match="on host elsewhere is writing to it"):
        check_unused(remote, "mark")


def test_a_run_whose_mirror_another_one_has_taken_over_leaves_it_alone(url, tmp_path):
    first, of_first = run_of(tmp_path / "first", url)
    save(of_first, 1)
    assert first.wait() is None
    second, of_second = run_of(tmp_path / "second", url)
    for step in (2, 3):
        save(of_second, step)
    assert second.wait() is None and second.steps() == [2, 3]
    save(of_first, 4)
    message = rf"run is not up to date: process {os.getpid()} on host .* copies a run of this name there now; stop one"
    assert re.search(message, first.wait() or "") and first.steps() == [2, 3]
    for name in second.remote.names():
        second.remote.remove(name)
    save(of_second, 4)
    assert second.wait() is None and second.steps() == [3, 4], "a copy that was removed is made again"
