"""Two processes train, one is killed, both go on, one hangs, one goes on alone: the losses are those of one process."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from runs import metrics, recipe, run

LAUNCH = (sys.executable, "-m", "jaxtune.launch")


def wait_for(file: Path, text: str, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 300
    while not (file.exists() and text in file.read_text()):
        assert process.poll() is None and time.monotonic() < deadline, f"no {text} in {file}"
        time.sleep(0.02)


def workers(launcher: subprocess.Popen) -> list[int]:
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text()
    both = [int(child) for child in children.split()]
    assert len(both) == 2
    return both


def test_two_processes_one_killed_then_hanging_and_resumed_as_one(tmp_path):
    path = recipe(tmp_path)
    run("jaxtune.train", f"--config={path}", "--config.train.run_name=one")
    expected = {row["step"]: row["loss"] for row in metrics(tmp_path / "runs/one") if "loss" in row}

    together = ("jaxtune.train", f"--config={path}", "--config.train.run_name=two", "--config.train.micro_batch_size=1")
    together += ("--config.train.hang_seconds=8",)
    launcher = subprocess.Popen(
        [*LAUNCH, "--processes=2", "--devices-per-process=2", "--restarts=1", "--grace=1"]
        + ["--log-dir", tmp_path / "logs", "--"]
        + [sys.executable, "-m", *together],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"},
    )
    folder = tmp_path / "runs" / "two"
    wait_for(folder / "checkpoints/4/manifest.json", "", launcher)
    os.kill(workers(launcher)[1], signal.SIGKILL)

    wait_for(tmp_path / "logs/process-0.log", "resumed from step", launcher)
    wait_for(folder / "metrics.jsonl", '"step": 17,', launcher)
    _, stopped = workers(launcher)
    os.kill(stopped, signal.SIGSTOP)  # process 0 waits for it
    assert launcher.wait(timeout=60) == 1
    assert not Path(f"/proc/{stopped}").exists(), "a stopped process is ended too"
    logs = [log.read_text() for log in sorted((tmp_path / "logs").iterdir())]
    assert "step 1/24" in logs[0] and "step 1/24" not in logs[1], "only process 0 reports"
    stacks = folder / "stacks-0.txt"
    assert "process 0 hangs in 'step': nothing has ended for 8 s" in logs[0] and f"are in {stacks}\n" in logs[0]
    assert "Thread 0x" in stacks.read_text() and "/jaxtune/run/loop.py" in stacks.read_text()

    output = run(*together, devices=4)
    assert "resumed from step" in output
    losses = {row["step"]: row["loss"] for row in metrics(folder) if "loss" in row}
    assert losses.keys() == expected.keys()
    difference = {step: abs(loss / expected[step] - 1) for step, loss in losses.items()}
    assert max(difference[step] for step in range(1, 21)) <= 1e-6, difference
    assert np.max(list(difference.values())) <= 1e-4
