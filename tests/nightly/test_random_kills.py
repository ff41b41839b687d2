"""Kills at random moments, of runs and of what saves checkpoints: nothing is lost but steps."""

import random
import time

from faults.test_checkpoint_faults import kill_and_restore, warnings_of
from runs import losses, recipe, run, start, until_step

COVERS = (
    "jaxtune/checkpoint",
    "jaxtune/data/loader.py",
    "jaxtune/run/lock.py",
    "jaxtune/run/loop.py",
    "jaxtune/run/resume.py",
)


def test_ten_random_kills(tmp_path):
    path = recipe(tmp_path, lora=True)
    command = ("jaxtune.train", f"--config={path}")
    run(*command, "--config.train.run_name=whole")
    rng = random.Random(1)
    for number in range(10):
        process = start(*command, "--config.train.run_name=random")
        until_step(process, tmp_path / "runs" / "random", min(2 * number + 1, 22))
        time.sleep(rng.random() * 0.3)
        process.kill()
        process.communicate()
    run(*command, "--config.train.run_name=random")
    assert losses(tmp_path / "runs" / "random") == losses(tmp_path / "runs" / "whole")


def test_many_kills_during_saves(tmp_path, caplog):
    kill_and_restore(tmp_path, 12, random.Random(1))
    assert all(warning.endswith("has no manifest.json, so it is not used") for warning in warnings_of(caplog))
