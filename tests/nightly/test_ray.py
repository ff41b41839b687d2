"""Ray trains with two workers on this machine, one is killed: the losses equal an undisturbed run's."""

import json
import os
import signal
import subprocess
import sys

import pytest
from hosts.test_train import ROOT, check_losses, train_undisturbed, training, wait_for

COVERS = (
    "launch/ray_train.py",
    "jaxtune/checkpoint",
    "jaxtune/monitor/signals.py",
    "jaxtune/parallel/multihost.py",
    "jaxtune/run/loop.py",
)


def test_a_killed_worker_is_started_again_and_the_run_goes_on(tmp_path):
    pytest.importorskip("ray", reason="needs Ray: pip install 'jaxtune[ray]'")
    home = train_undisturbed(tmp_path)
    output, folder = tmp_path / "output", home / "runs" / "ray"
    environment = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    with output.open("w") as file:
        driver = subprocess.Popen(
            [
                sys.executable,
                ROOT / "launch/ray_train.py",
                "--workers=2",
                "--restarts=1",
                *training(home, "ray", 3)[1:],
            ],
            env={**os.environ, **environment, "PYTHONPATH": str(ROOT)},
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    wait_for(folder / "checkpoints/4/manifest.json", "", driver)
    os.kill(json.loads((folder / "lock").read_text())["process"], signal.SIGKILL)
    assert driver.wait(timeout=300) == 0, output.read_text()
    assert "resumed from step" in output.read_text()
    check_losses(home, "ray")
