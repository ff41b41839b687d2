"""SIGTERM and the first Ctrl-C request a stop; the second Ctrl-C ends the run immediately."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from jaxtune.monitor.signals import StopRequest


def wait_until(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_is_a_wish(number, capfd):
    with StopRequest() as stop:
        assert not stop.is_requested() and not stop.agree()
        os.kill(os.getpid(), number)
        wait_until(stop.is_requested)
        assert stop.agree()
        os.kill(os.getpid(), signal.SIGTERM)  # a scheduler may repeat it
        time.sleep(0.05)
    lines = [line for line in capfd.readouterr().err.splitlines() if line]
    assert len(lines) == 1 and "saving" in lines[0]


def test_everything_is_as_before_afterwards():
    def handlers():
        return [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]

    before, threads = handlers(), threading.active_count()
    for _ in range(2):
        with StopRequest():
            assert handlers() != before
    assert handlers() == before and threading.active_count() == threads
    assert signal.set_wakeup_fd(-1) == -1


# The main thread is in one long C call, as in XLA's compiler: Python runs no handler there.
BUSY = """
import ctypes, sys
from jaxtune.monitor.signals import StopRequest
with StopRequest() as stop:
    print("ready", flush=True)
    libc = ctypes.CDLL(None)
    for _ in range(60):
        left = 1
        while left:
            left = libc.sleep(left)
"""


def test_the_second_ctrl_c_leaves_at_once_even_out_of_compiled_code():
    with subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGINT)
        assert b"saving" in process.stderr.readline() + process.stderr.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=5) == 130


def test_in_another_thread_no_signal_is_heard_and_nothing_fails():
    answers = []

    def train():
        with StopRequest() as stop:
            answers.append(stop.agree())

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=train)
    thread.start()
    thread.join(10)
    assert answers == [False] and signal.getsignal(signal.SIGTERM) == before
