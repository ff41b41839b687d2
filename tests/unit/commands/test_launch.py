"""`jaxtune launch`: N processes, a log each; the first failure ends all, signals are passed on."""

import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest

from jaxtune import launch as launch_module

ROOT = pathlib.Path(__file__).parents[3]


def launch(tmp_path, script, *options, processes=2, **kwargs):
    command = [sys.executable, "-m", "jaxtune.launch", f"--processes={processes}", f"--log-dir={tmp_path}"]
    command += [*options, "--", sys.executable, "-c", script]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **kwargs)


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_each_process_knows_its_place_and_has_a_log(tmp_path):
    script = "import os; print({k: v for k, v in os.environ.items() if k.startswith(('JAX', 'CUDA_VIS'))})"
    process = launch(tmp_path, script, "--devices-per-process=3")
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 0
    logs = [(tmp_path / f"process-{index}.log").read_text() for index in range(2)]
    assert logs[0] in out and logs[1] not in out
    seen = [eval(log) for log in logs]
    assert [one["JAXTUNE_PROCESS_ID"] for one in seen] == ["0", "1"]
    assert all(one["JAXTUNE_NUM_PROCESSES"] == "2" and one["JAX_NUM_CPU_DEVICES"] == "3" for one in seen)
    assert seen[0]["JAXTUNE_COORDINATOR"] == seen[1]["JAXTUNE_COORDINATOR"]


def test_logs_of_an_earlier_start_are_kept(tmp_path):
    for word in ("first", "second"):
        out, _ = launch(tmp_path, f"print('{word}')", processes=1).communicate(timeout=30)
    assert "second" in out and "first" not in out
    assert re.fullmatch(r"first\n\n==== started at .*\nsecond\n", (tmp_path / "process-0.log").read_text())


@pytest.mark.parametrize(
    ("visible", "slices"),
    [(None, ["0,1", "2,3"]), ("7,5,3,1", ["7,5", "3,1"])],
)
def test_gpus_are_shared_out(tmp_path, visible, slices):
    environment = {key: value for key, value in os.environ.items() if key != "CUDA_VISIBLE_DEVICES"}
    if visible is not None:
        environment["CUDA_VISIBLE_DEVICES"] = visible
    script = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"
    process = launch(tmp_path, script, "--gpus-per-process=2", env=environment)
    process.communicate(timeout=30)
    assert [(tmp_path / f"process-{index}.log").read_text().strip() for index in range(2)] == slices


def test_the_first_failure_ends_all_with_its_exit_code_and_log(tmp_path):
    script = """
import os, signal, sys, time
print(os.getpid(), flush=True)
if os.environ["JAXTUNE_PROCESS_ID"] == "1":
    time.sleep(0.3)
    sys.exit("no such tensor")
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # hangs in a collective: has to be killed
time.sleep(60)
"""
    start = time.monotonic()
    process = launch(tmp_path, script, "--grace=0.5")
    _, error = process.communicate(timeout=30)
    assert time.monotonic() - start < 15
    assert process.returncode == 1
    assert "process 1 failed with exit code 1" in error and "no such tensor" in error
    pids = [int((tmp_path / f"process-{index}.log").read_text().split()[0]) for index in range(2)]
    assert not any(alive(pid) for pid in pids)


def test_a_run_that_was_stopped_is_no_failure(tmp_path):
    """One process may end a little before the others."""
    script = (
        "import os, sys, time; time.sleep(0.3 * int(os.environ['JAXTUNE_PROCESS_ID'])); print('saved'); sys.exit(75)"
    )
    process = launch(tmp_path, script)
    _, error = process.communicate(timeout=30)
    assert (process.returncode, error) == (75, "")
    assert [(tmp_path / f"process-{index}.log").read_text() for index in range(2)] == ["saved\n"] * 2


def test_a_process_that_is_killed_is_a_failure(tmp_path):
    script = "import os, time; os.environ['JAXTUNE_PROCESS_ID'] == '0' and os.kill(os.getpid(), 9); time.sleep(60)"
    process = launch(tmp_path, script)
    _, error = process.communicate(timeout=30)
    assert process.returncode == 128 + 9 and "process 0 was ended by SIGKILL" in error


def test_after_a_failure_all_start_again_and_resume(tmp_path):
    script = """
import os, sys, time
print(sys.argv[1:], flush=True)
if len(sys.argv) < 3:
    os.environ["JAXTUNE_PROCESS_ID"] == "1" and os.kill(os.getpid(), 9)
    time.sleep(60)
"""
    process = launch(tmp_path, script, "--restarts=3")
    out, error = process.communicate(timeout=30)
    assert process.returncode == 0
    again = ["--config.ckpt.resume=auto"]
    expected = "".join(f"{again * times}\n" for times in range(3))
    assert [(tmp_path / f"process-{index}.log").read_text() for index in range(2)] == [expected] * 2
    assert expected in out, "output of every start"
    assert error.count("process 1 was ended by SIGKILL") == 2 and "restarting all processes; restarts left: 1" in error


@pytest.mark.parametrize(
    ("last", "code", "starts"),
    [("sys.exit('a bug')", 1, 2), ("sys.exit(2)", 2, 1), ("sys.exit(75)", 75, 1)],
    ids=["restarts run out", "an error of the user's", "asked to stop"],
)
def test_restarts_have_an_end(tmp_path, last, code, starts):
    process = launch(tmp_path, f"import sys; print('started', flush=True); {last}", "--restarts=1", processes=1)
    process.communicate(timeout=30)
    assert process.returncode == code
    assert (tmp_path / "process-0.log").read_text().count("started") == starts


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_reaches_every_process_once(tmp_path, number):
    script = f"""
import signal, time
count = []
signal.signal({int(number)}, lambda *_: count.append(1))
print("ready", flush=True)
while not count:
    time.sleep(0.01)
time.sleep(0.5)
print("signals", len(count))
"""
    process = launch(tmp_path, script, start_new_session=True)
    logs = [tmp_path / f"process-{index}.log" for index in range(2)]
    deadline = time.monotonic() + 20
    while not all(log.exists() and "ready" in log.read_text() for log in logs):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.killpg(process.pid, number)  # like Ctrl-C in a terminal: to the whole foreground group
    process.communicate(timeout=30)
    assert process.returncode == 0
    assert [log.read_text() for log in logs] == ["ready\nsignals 1\n"] * 2


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "no command: --processes=2 -- python"),
        (["--grace=-1", "--", "true"], "grace"),
        (["--", "no-such-program"], "command not found: 'no-such-program'"),
        (["--gpus-per-process=2", "--", sys.executable], "2 x 2 GPUs are not in CUDA_VISIBLE_DEVICES=4"),
    ],
)
def test_what_cannot_be_started_is_refused(monkeypatch, capsys, arguments, reason):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4")
    assert launch_module.main(["--processes=2", *arguments]) == 2
    assert reason in capsys.readouterr().err


def test_help_names_the_command(capsys):
    assert launch_module.main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert "python -m jaxtune.launch --processes 2 -- python" in shown and "--gpus-per-process: GPUs of each" in shown
