"""A run that makes no progress is ended, and the stacks of its threads are written to a file."""

import os
import threading
import time

import pytest

from jaxtune.monitor import hang
from jaxtune.monitor.goodput import Goodput


@pytest.fixture
def left(monkeypatch):
    """Return an event that is set when the process would end."""
    left = threading.Event()
    monkeypatch.setattr(hang, "TICK_SECONDS", 0.01)
    monkeypatch.setattr(hang, "LEAVE_SECONDS", 0.2)
    monkeypatch.setattr(os, "_exit", lambda code: code == 1 and left.set())
    return left


def waits_for_ever(left):
    assert left.wait(30)


def test_what_moves_goes_on_and_what_hangs_is_ended(tmp_path, left, capfd):
    goodput, stacks = Goodput(), tmp_path / "stacks-0.txt"
    with hang.exit_when_hung(goodput, 1, stacks), goodput.measure("eval"):
        for _ in range(30):
            time.sleep(0.05)
            goodput.beat()  # a batch of a long evaluation
        assert not left.is_set()
        waits_for_ever(left)
    assert "waits_for_ever" in stacks.read_text()
    (line,) = [line for line in capfd.readouterr().err.splitlines() if line]
    assert "process 0 hangs in 'eval': nothing has ended for 1 s" in line and str(stacks) in line


def test_without_a_limit_or_after_the_run_nothing_is_watched(tmp_path, left):
    with hang.exit_when_hung(Goodput(), None, tmp_path / "stacks"):
        assert "hang watch" not in {thread.name for thread in threading.enumerate()}
    with hang.exit_when_hung(Goodput(), 1, tmp_path / "stacks"):
        watch = next(thread for thread in threading.enumerate() if thread.name == "hang watch")
    watch.join(10)
    assert not watch.is_alive() and not left.is_set()
