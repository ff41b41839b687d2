"""Two processes train together, one hangs, and one process goes on: the losses are those of a single-process run."""

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


def test_two_processes_that_hang_are_ended_and_resumed_as_one(tmp_path):
    path = recipe(tmp_path)
    run("jaxtune.train", f"--config={path}", "--config.train.run_name=one")
    expected = {row["step"]: row["loss"] for row in metrics(tmp_path / "runs/one") if "loss" in row}

    together = ("jaxtune.train", f"--config={path}", "--config.train.run_name=two", "--config.train.micro_batch_size=1")
    together += ("--config.train.hang_seconds=8",)
    launcher = subprocess.Popen(
        [*LAUNCH, "--processes=2", "--devices-per-process=2", "--grace=1", "--log-dir", tmp_path / "logs", "--"]
        + [sys.executable, "-m", *together],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"},
    )
    folder = tmp_path / "runs" / "two"
    wait_for(folder / "metrics.jsonl", '"step": 11,', launcher)
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text()
    workers = [int(child) for child in children.split()]
    assert len(workers) == 2
    os.kill(workers[1], signal.SIGSTOP)  # process 0 waits for it
    assert launcher.wait(timeout=60) == 1
    assert not Path(f"/proc/{workers[1]}").exists(), "a stopped process is ended too"
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
