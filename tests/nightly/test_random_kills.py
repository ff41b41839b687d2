"""A hundred kills at random moments, from the first import to the end of an export, lose only steps.

CAMPAIGN_SEED, a number, chooses other moments.
"""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from faults.test_checkpoint_faults import kill_and_restore, warnings_of
from hosts.test_train import LAUNCH, training, workers
from runs import losses, recipe, run, start

TAKES_LONG = True  # 21 minutes on two cores
COVERS = (
    "jaxtune/checkpoint",
    "jaxtune/data/rows/loader.py",
    "jaxtune/hf/tensors/tensor_writing.py",
    "jaxtune/exports/write.py",
    "jaxtune/exports/peft_targets.py",
    "jaxtune/exports/tokenizer_files.py",
    "jaxtune/host/lock.py",
    "jaxtune/run/loop.py",
    "jaxtune/run/resume.py",
)
SEED = int(os.environ.get("CAMPAIGN_SEED", "0"))


@pytest.fixture
def rng(request, capsys):
    with capsys.disabled():
        print(f"\nseed {SEED}: {request.node.name}")
    return random.Random(SEED)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Return the folder of a recipe and of its undisturbed run `whole`, and the seconds that the run took."""
    folder = tmp_path_factory.mktemp("home")
    begin = time.monotonic()
    run("jaxtune.train", f"--config={recipe(folder, lora=True)}", "--config.train.run_name=whole")
    return folder, time.monotonic() - begin


def files(folder: Path) -> dict[str, bytes]:
    """Return the files of an export except its card and its picture, which name the run."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix not in (".md", ".png")}


def kill_at_random(command: list[str], seconds: float, rng: random.Random) -> bool:
    """Return whether the command was killed within `seconds`; otherwise it has ended without an error."""
    process = start(*command)
    time.sleep(rng.uniform(0, seconds))
    process.kill()
    output, _ = process.communicate()
    assert process.returncode in (0, -signal.SIGKILL) and "Traceback" not in output, output
    return process.returncode != 0


@pytest.mark.timeout(3600)
def test_sixty_kills_of_runs(home, rng):
    folder, seconds = home
    kills = runs = 0
    while kills < 60:
        name = f"random{runs}"
        command = ["jaxtune.train", f"--config={folder / 'tiny_lora.py'}", f"--config.train.run_name={name}"]
        while kills < 60 and kill_at_random(command, 1.1 * seconds, rng):
            kills += 1
        if kills == 60:
            run(*command)
        assert losses(folder / "runs" / name) == losses(folder / "runs" / "whole")
        assert files(folder / "runs" / name / "export") == files(folder / "runs" / "whole" / "export")
        runs += 1
    print(f"{kills} kills of {runs} runs")


def test_twenty_kills_during_saves(tmp_path, caplog, rng):
    kill_and_restore(tmp_path, 20, rng)
    assert all(warning.endswith("has no manifest.json, so it is not used") for warning in warnings_of(caplog))


def test_ten_kills_during_exports(home, tmp_path, rng):
    """All exports go to one folder; the export that follows is the same as one to an empty folder."""
    folder = home[0]
    command = ["jaxtune.export", f"--run={folder / 'runs' / 'whole'}", "--merge"]
    begin = time.monotonic()
    run(*command, f"--output={tmp_path / 'whole'}")
    seconds = time.monotonic() - begin
    for _ in range(10):
        while not kill_at_random([*command, f"--output={tmp_path / 'random'}"], seconds, rng):
            pass
    run(*command, f"--output={tmp_path / 'random'}")
    assert files(tmp_path / "random") == files(tmp_path / "whole")
    assert not [path for path in tmp_path.iterdir() if path.name not in ("random", "whole")], "stages are removed"


@pytest.mark.timeout(3600)
def test_ten_kills_of_one_of_two_processes(home, tmp_path, rng):
    """One is killed after the first step. The other ends by itself, and both continue from a checkpoint."""
    folder = home[0]

    def launch(name: str) -> tuple[subprocess.Popen, Path]:
        logs = tmp_path / "logs" / name
        command = [*LAUNCH, "--processes=2", "--devices-per-process=1", "--grace=1", "--log-dir", logs, "--"]
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
        shutil.rmtree(logs, ignore_errors=True)
        trained = training(folder, name, 6, "ckpt.save_steps=1", "ckpt.keep_last=3")
        return subprocess.Popen([*command, sys.executable, "-m", *trained], env=environment), logs

    launched, _ = launch("undisturbed")
    assert launched.wait(timeout=300) == 0
    kills = runs = 0
    while kills < 10:
        name = f"two{runs}"
        launched, logs = launch(name)
        while launched.poll() is None and "step " not in _text(logs / "process-0.log"):
            time.sleep(0.02)
        time.sleep(rng.uniform(0, 3))
        if launched.poll() is None:
            os.kill(rng.choice(workers(launched)), signal.SIGKILL)
            kills += 1
            launched.wait(timeout=60)
            for log in logs.iterdir():
                assert "Traceback" not in log.read_text(), log.read_text()
        if launched.poll() == 0 or kills == 10:
            assert kills == 10 or launched.returncode == 0
            launched, _ = launch(name)
            assert launched.wait(timeout=300) == 0
            assert losses(folder / "runs" / name) == losses(folder / "runs" / "undisturbed")
            runs += 1
    print(f"{kills} kills of {runs} runs of two processes")


def _text(file: Path) -> str:
    return file.read_text() if file.exists() else ""
