"""The lock of a run folder: errors name its holder, and a killed process does not keep it."""

import json
import os
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from jaxtune.errors import UserError
from jaxtune.host import lock

HOLD = """
import pathlib, sys, time
from jaxtune.host.lock import hold_lock

with hold_lock(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path):
    """Start another process that holds the lock."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, tmp_path], stdout=subprocess.PIPE, text=True)
    assert process.stdout and process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def of_another_host(folder, age: float):
    (folder / "lock").write_text(json.dumps({"process": 7, "host": "elsewhere", "since": "2026-01-01 00:00:00 UTC"}))
    os.utime(folder / "lock", (time.time() - age,) * 2)


def test_a_second_run_is_told_who_holds_the_folder_until_that_one_is_killed(tmp_path, holder):
    with pytest.raises(UserError) as refusal, lock.hold_lock(tmp_path):
        pass
    assert f"{tmp_path} is in use: process {holder.pid} host {socket.gethostname()} since 20" in str(refusal.value)
    assert "--config.train.run_name" in str(refusal.value)
    holder.kill()
    holder.wait()
    with lock.hold_lock(tmp_path):
        assert json.loads((tmp_path / "lock").read_text())["process"] == os.getpid()


def test_the_lock_goes_with_its_run_also_when_that_fails(tmp_path):
    with pytest.raises(ZeroDivisionError), lock.hold_lock(tmp_path / "new"):
        raise ZeroDivisionError
    assert not list((tmp_path / "new").iterdir())


def test_in_one_process_too(tmp_path):
    with lock.hold_lock(tmp_path), pytest.raises(UserError, match=f"process {os.getpid()} "), lock.hold_lock(tmp_path):
        pass


@pytest.mark.parametrize("flock", [True, False])
def test_a_run_of_another_host_is_waited_for_until_it_is_known_to_live_or_not(tmp_path, flock, monkeypatch):
    if not flock:
        monkeypatch.setattr(lock, "_try_lock", lambda file: None)
    of_another_host(tmp_path, age=lock.TAKE_OVER_SECONDS - 60)
    monkeypatch.setattr(lock.time, "sleep", lambda _: os.utime(tmp_path / "lock"))  # the holder's next sign of life
    with pytest.raises(UserError, match="in use: process 7 host elsewhere since 2026"), lock.hold_lock(tmp_path):
        pass
    waits = []
    of_another_host(tmp_path, age=lock.TAKE_OVER_SECONDS - 50)
    now = time.time()
    monkeypatch.setattr(lock.time, "sleep", waits.append)
    monkeypatch.setattr(lock.time, "time", lambda: now + 20 * len(waits))  # the holder no longer touches it
    with lock.hold_lock(tmp_path):
        assert json.loads((tmp_path / "lock").read_text())["host"] == socket.gethostname()
    assert len(waits) == 3


def test_a_lock_that_a_power_cut_left_half_written_is_taken(tmp_path):
    (tmp_path / "lock").write_bytes(b"\0" * 40)
    with lock.hold_lock(tmp_path):
        assert json.loads((tmp_path / "lock").read_text())["process"] == os.getpid()


def test_a_file_system_without_flock_waits_for_the_last_touch(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "_try_lock", lambda file: None)
    monkeypatch.setattr(lock, "TOUCH_SECONDS", 0.05)
    monkeypatch.setattr(lock, "POLL_SECONDS", 0.2)
    with lock.hold_lock(tmp_path), pytest.raises(UserError, match="is in use"), lock.hold_lock(tmp_path):
        pass


def test_the_holder_touches_the_lock(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "TOUCH_SECONDS", 0.01)
    with lock.hold_lock(tmp_path):
        os.utime(tmp_path / "lock", (0, 0))
        deadline = time.monotonic() + 60
        while (tmp_path / "lock").stat().st_mtime < 1e9:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_a_process_that_does_not_see_the_lock_of_the_main_one_is_named(tmp_path, monkeypatch):
    """Two hosts, each with a separate folder: this process is the second, and its folder has another run's lock."""
    of_another_host(tmp_path, age=0)
    mark = lock._mark(tmp_path / "lock")
    monkeypatch.setattr(lock.multihost, "is_main", lambda: False)
    monkeypatch.setattr(lock.multihost_utils, "broadcast_one_to_all", lambda _: mark + 1)
    monkeypatch.setattr(lock.multihost_utils, "process_allgather", lambda blind: np.array([False, blind]))
    monkeypatch.setattr(lock, "SEEN_SECONDS", 0)
    monkeypatch.setattr(lock, "POLL_SECONDS", 0)
    with pytest.raises(UserError, match=f"process 1 does not see .* to {tmp_path}"), lock.hold_lock(tmp_path):
        pass
    monkeypatch.setattr(lock.multihost_utils, "broadcast_one_to_all", lambda _: mark)
    with lock.hold_lock(tmp_path):
        pass
    assert (tmp_path / "lock").exists(), "only the main process removes it"
