"""Two processes train; one is killed, one hangs, one continues by itself. The losses equal a single process's."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from runs import call, metrics, recipe, run
from tiny import write_model_folder

ROOT = Path(__file__).parents[2]
LAUNCH = (sys.executable, "-m", "jaxtune.launch")


def wait_for(file: Path, text: str, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 300
    while not (file.exists() and text in file.read_text()):
        assert process.poll() is None and time.monotonic() < deadline, f"no {text} in {file}"
        time.sleep(0.02)


def workers(launcher: subprocess.Popen) -> list[int]:
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text()
    processes = [int(child) for child in children.split()]
    assert len(processes) == 2
    return processes


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Return a folder with the recipe and its undisturbed run on one device, `one`."""
    return train_undisturbed(tmp_path_factory.mktemp("home"))


def train_undisturbed(home: Path) -> Path:
    """Return the folder, with the run on one device that others must equal."""
    call(*training(home, "one", rows=12))
    return home


def training(home: Path, name: str, rows: int, *options: str) -> list[str]:
    """Return the command of a run with `rows` rows on a device; a step has 12 rows."""
    settings = (f"train.run_name={name}", f"train.micro_batch_size={rows}", *options)
    return ["jaxtune.train", f"--config={recipe(home)}", *(f"--config.{setting}" for setting in settings)]


def check_losses(home: Path, name: str) -> None:
    expected, losses = (
        {row["step"]: row["loss"] for row in metrics(home / "runs" / run) if "loss" in row} for run in ("one", name)
    )
    assert losses.keys() == expected.keys()
    difference = {step: abs(loss / expected[step] - 1) for step, loss in losses.items()}
    assert max(difference[step] for step in range(1, 21)) <= 1e-6, difference
    assert max(difference.values()) <= 1e-4, difference


def test_two_processes_one_killed_then_hanging_and_resumed_as_one(home, tmp_path):
    """Each process has a device that the run does not use; each of the two used devices has three rows."""
    together = training(home, "two", 3, "train.hang_seconds=8")
    launcher = subprocess.Popen(
        [*LAUNCH, "--processes=2", "--devices-per-process=3", "--restarts=1", "--grace=1"]
        + ["--log-dir", tmp_path / "logs", "--"]
        + [sys.executable, "-m", *together, "--config.device.gpus=2"],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"},
    )
    folder = home / "runs" / "two"
    wait_for(folder / "checkpoints/4/manifest.json", "", launcher)
    os.kill(workers(launcher)[1], signal.SIGKILL)

    wait_for(tmp_path / "logs/process-0.log", "resumed from step", launcher)
    wait_for(folder / "metrics.jsonl", '"step": 17,', launcher)
    _, stopped = workers(launcher)
    os.kill(stopped, signal.SIGSTOP)  # process 0 waits for it
    assert launcher.wait(timeout=60) == 1
    assert not Path(f"/proc/{stopped}").exists(), "a stopped process is killed too"
    logs = [log.read_text() for log in sorted((tmp_path / "logs").iterdir())]
    assert "Traceback" not in logs[0], "a process that has lost the other reports it in one line"
    assert "step 1/24" in logs[0] and "step 1/24" not in logs[1], "only process 0 reports"
    stacks = folder / "stacks-0.txt"
    assert "process 0 hangs in 'step': nothing has ended for 8 s" in logs[0] and f"are in {stacks}\n" in logs[0]
    assert "Thread 0x" in stacks.read_text() and "/jaxtune/run/loop.py" in stacks.read_text()

    output = run(*together, devices=4)
    assert "resumed from step" in output
    check_losses(home, "two")


def test_hosts_may_change_in_number_between_starts(home):
    """Four, then two, then three simulated devices; each start continues from a checkpoint of the previous one."""
    data = ("mesh.fsdp=1", "mesh.data=-1", "ckpt.keep_last=9")
    call(*training(home, "elastic", 3, *data), devices=4)
    call(*training(home, "elastic", 6, *data, "ckpt.resume=8"), devices=2)
    assert "resumed from step 16" in call(*training(home, "elastic", 4, *data, "ckpt.resume=16"), devices=3)
    check_losses(home, "elastic")


def test_two_processes_read_one_stream_and_one_goes_on_with_it(home, tmp_path):
    """Each process packs all rows and trains its share; windows end within and between steps; a mirror passes it on."""
    options = ("data.streaming=yes", "data.window_rows=10", "ckpt.save_steps=3", "optim.schedule=constant")

    def stream(name: str, rows: int, steps: int) -> list[str]:
        return training(home, name, rows, *options, f"train.max_steps={steps}")

    call(*stream("stream-one", 12, 9))
    options += (f"ckpt.mirror=file://{tmp_path}/mirror",)
    launch = [*LAUNCH, "--processes=2", "--devices-per-process=1", "--log-dir", tmp_path / "logs", "--"]
    command = [*launch, sys.executable, "-m", *stream("stream-two", 6, 6)]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    subprocess.run(command, env=environment, check=True, timeout=600)
    assert "mirror:   file:///" in (tmp_path / "logs/process-0.log").read_text()
    shutil.rmtree(home / "runs" / "stream-two")
    os.utime(home / "chat.jsonl", (0, 0))  # another machine has a copy of the data
    assert "resumed from step 6" in call(*stream("stream-two", 12, 9))
    one, two = ([row["loss"] for row in metrics(home / "runs" / name)] for name in ("stream-one", "stream-two"))
    assert len(one) == len(two) == 9 and max(abs(b / a - 1) for a, b in zip(one, two)) <= 1e-6


def test_two_processes_score_a_teacher_as_one(home, tmp_path):
    """Each process writes its own part and reads it again; the single process reads the newest file."""
    write_model_folder(home / "teacher", hidden_size=64)
    options = (
        f"distill.teacher={home / 'teacher'}",
        "distill.top_k=8",
        "train.max_steps=3",
        "optim.learning_rate=1e-3",
    )
    call(*training(home, "student", 12, *options, f"data.cache_dir={tmp_path / 'one'}"))
    together = training(home, "students", 3, *options, f"data.cache_dir={tmp_path / 'two'}")
    launch = [*LAUNCH, "--processes=2", "--devices-per-process=2", "--log-dir", tmp_path / "logs", "--"]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    subprocess.run([*launch, sys.executable, "-m", *together], env=environment, check=True, timeout=300)
    expected, losses = (
        [row["loss"] for row in metrics(home / "runs" / name) if "loss" in row] for name in ("student", "students")
    )
    # Untrained models: 0.004 nats between distributions whose log-probabilities, about 5.6, are rounded.
    assert len(losses) == 3 and max(abs(a - b) for a, b in zip(expected, losses)) <= 2e-7
    one, two = (np.load(next((tmp_path / name).glob("teacher-*.npy"))) for name in ("one", "two"))
    assert not [*(tmp_path / "two").glob("*.tmp")]
    np.testing.assert_allclose(one["teacher_log_probs"], two["teacher_log_probs"], atol=1e-4)
