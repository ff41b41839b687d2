"""Kills, damage and full disks: the newest good checkpoint is always found, and a message names the bad ones."""

import logging
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import SingleDeviceSharding

import jaxtune
from jaxtune.checkpoint import CheckpointManager, manager, manifest
from jaxtune.errors import UserError

SIZE = 1 << 16


def state_of(step: int):
    return {"weight": jnp.asarray(np.random.default_rng(step).normal(size=SIZE), jnp.float32), "step": jnp.int32(step)}


def restore(manager: CheckpointManager, step: int | None = None):
    sharding = SingleDeviceSharding(jax.devices()[0])
    like = {
        "weight": jax.ShapeDtypeStruct((SIZE,), np.float32, sharding=sharding),
        "step": jax.ShapeDtypeStruct((), np.int32, sharding=sharding),
    }
    return manager.restore(like, step)


def assert_is(restored, step: int):
    assert (restored.step, restored.host, int(restored.state["step"])) == (step, {"row": 10 * step}, step)
    np.testing.assert_array_equal(np.asarray(restored.state["weight"]), np.asarray(state_of(step)["weight"]))


def save_steps(folder: Path, *steps: int) -> CheckpointManager:
    manager = CheckpointManager(folder, keep_last=len(steps))
    for step in steps:
        manager.save(step, state_of(step), {"row": 10 * step})
    manager.wait(final=True)
    return manager


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size > 0)


def warnings_of(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    save_steps(folder, 1, 2)
    return folder


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_flipped_bit_anywhere_is_found(two_steps, data):
    path = data.draw(st.sampled_from(files_of(two_steps / "2")))
    original = path.read_bytes()
    bit = data.draw(st.integers(0, 8 * len(original) - 1))
    damaged = bytearray(original)
    damaged[bit // 8] ^= 1 << bit % 8
    try:
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=r"checkpoint 2 .* is damaged: .*; without a step, the newest good"):
            restore(CheckpointManager(two_steps), step=2)
        assert_is(restore(CheckpointManager(two_steps)), 1)
    finally:
        path.write_bytes(original)


@pytest.mark.parametrize("damage", ["flipped", "truncated", "deleted"])
def test_each_damaged_file_is_named_once(two_steps, caplog, damage):
    for path in files_of(two_steps / "2"):
        if path.name == "manifest.json" and damage == "deleted":
            continue  # then it is not a checkpoint at all: see below
        original = path.read_bytes()
        caplog.clear()
        try:
            if damage == "deleted":
                path.unlink()
            elif damage == "truncated":
                path.write_bytes(original[:-1])
            else:
                path.write_bytes(bytes([original[0] ^ 128]) + original[1:])
            assert_is(restore(CheckpointManager(two_steps)), 1)
        finally:
            path.write_bytes(original)
        (warning,) = warnings_of(caplog)
        assert f"checkpoint 2 in {two_steps} is damaged: {path.relative_to(two_steps / '2')}: " in warning
    caplog.clear()
    assert_is(restore(CheckpointManager(two_steps)), 2)
    assert warnings_of(caplog) == []


def test_several_processes_verify_each_file_once(two_steps, tmp_path):
    for path in files_of(two_steps / "2"):
        (tmp_path / path.relative_to(two_steps / "2")).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(two_steps / "2" / "manifest.json", tmp_path)
    missing = manifest.verify(tmp_path)
    shares = [manifest.verify(tmp_path, share=(process, 3)) for process in range(3)]
    assert sorted(problem for share in shares for problem in share) == sorted(missing)
    assert min(map(len, shares)) >= len(missing) // 3 > 0


def test_all_damaged_is_an_error_and_not_a_fresh_start(tmp_path):
    save_steps(tmp_path, 1, 2)
    for step in ("1", "2"):
        (tmp_path / step / "host.json").write_text("{}")
    with pytest.raises(UserError, match=r"all checkpoints .* are damaged$"):
        restore(CheckpointManager(tmp_path))


def test_a_folder_without_manifest_is_not_a_checkpoint_and_goes(tmp_path, caplog):
    save_steps(tmp_path, 1, 2)
    (tmp_path / "2" / "manifest.json").unlink()
    (tmp_path / "3.orbax-checkpoint-tmp").mkdir()
    (tmp_path / "notes").mkdir()
    manager = CheckpointManager(tmp_path, keep_last=5)
    assert manager.steps() == [1]
    assert_is(restore(manager), 1)
    manager.save(4, state_of(4), {"row": 40})
    manager.wait(final=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "4", "notes"]
    assert warnings_of(caplog) == [f"checkpoint 2 in {tmp_path} has no manifest.json, so it is not used"]


def test_a_damaged_checkpoint_is_replaced_and_never_counted(tmp_path):
    save_steps(tmp_path, 1, 2, 3)
    (tmp_path / "3" / "host.json").write_text("{}")
    manager = CheckpointManager(tmp_path, keep_last=2)
    assert_is(restore(manager), 2)
    manager.save(4, state_of(4), {"row": 40})
    manager.wait(final=True)
    assert manager.steps() == [2, 4]
    (tmp_path / "4" / "host.json").write_text("{}")
    manager = CheckpointManager(tmp_path, keep_last=2)
    assert_is(restore(manager), 2)
    manager.save(4, state_of(4), {"row": 40})
    assert_is(restore(manager), 4)


def test_a_half_removed_checkpoint_is_none(tmp_path, monkeypatch):
    manager = save_steps(tmp_path, 1)
    monkeypatch.setattr(shutil, "rmtree", lambda *arguments, **options: None)  # as if killed before it is removed
    manager.save(2, state_of(2), {"row": 20})
    manager.wait(final=True)
    assert (tmp_path / "1").is_dir() and manager.steps() == [2]


def test_a_full_disk_costs_a_checkpoint_and_not_the_run(tmp_path, caplog):
    manager = save_steps(tmp_path, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (SIZE, hard))  # bytes a file may have; the error is as for a full disk
    try:
        manager.save(2, state_of(2), {"row": 20})
        manager.wait()
        (warning,) = warnings_of(caplog)
        assert "checkpoint 2 was not saved" in warning and "training continues" in warning
        assert manager.steps() == [1]
        manager.save(3, state_of(3), {"row": 30})
        with pytest.raises(UserError, match="checkpoint 3 was not saved"):
            manager.wait(final=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert manager.steps() == [1]
    manager.save(3, state_of(3), {"row": 30})
    manager.wait(final=True)
    # A write still under way may leave a file after the failed save was removed: the next save removes it.
    assert [path.name for path in tmp_path.iterdir()] == ["3"]
    assert_is(restore(CheckpointManager(tmp_path)), 3)


ENDLESS_RUN = textwrap.dedent(
    """
    import sys
    from pathlib import Path
    sys.path.insert(0, str(Path(sys.argv[1]).parent))
    import test_checkpoint_faults as run
    manager = run.CheckpointManager(Path(sys.argv[2]), keep_last=2)
    restored = run.restore(manager)
    step = restored.step if restored else 0
    print("ready", flush=True)
    while True:
        step += 1
        manager.save(step, run.state_of(step), {"row": 10 * step})
    """
)


def kill_and_restore(folder: Path, kills: int, rng: random.Random) -> None:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(Path(jaxtune.__file__).parents[1])}
    newest = 0
    for number in range(kills):
        command = [sys.executable, "-c", ENDLESS_RUN, __file__, str(folder)]
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout.readline() == "ready\n"
            time.sleep(rng.uniform(0.1, 0.6))
            while number == kills - 1 and not any(folder.glob("*/manifest.json")):  # no save has finished yet
                time.sleep(0.05)
            child.send_signal(signal.SIGKILL)
        restored = restore(CheckpointManager(folder, keep_last=2))
        step = restored.step if restored else 0
        assert step >= newest
        if restored:
            assert_is(restored, step)
        newest = step
    assert newest > 0
    manager = CheckpointManager(folder, keep_last=2)
    restore(manager)
    manager.save(newest + 1, state_of(newest + 1), {"row": 10 * (newest + 1)})
    manager.wait(final=True)
    assert sorted(int(path.name) for path in folder.iterdir()) == manager.steps()


def test_kill_during_saves(tmp_path, caplog):
    kill_and_restore(tmp_path, 3, random.Random(0))
    assert all(warning.endswith("has no manifest.json, so it is not used") for warning in warnings_of(caplog))


def test_what_still_writes_after_a_save_has_failed_says_nothing_more(capsys):
    """On a full disk each array raises such an error in a tensorstore thread; any other error is shown."""
    for text in ("Event loop is closed", "another"):
        manager._not_tensorstore_noise(RuntimeError, RuntimeError(text), None)
    assert capsys.readouterr().err == "RuntimeError: another\n"
