"""A run fetches checkpoints from its mirror before it begins, by ckpt.resume."""

import dataclasses
import logging

import jax.numpy as jnp
import pytest

from jaxtune.checkpoint import CheckpointManager
from jaxtune.config.schema import CkptOptions, Config, TrainOptions
from jaxtune.errors import UserError
from jaxtune.host.run_folder import RunFolder, run_folder
from jaxtune.run import mirror_sync


@pytest.fixture
def config(tmp_path):
    train = TrainOptions(output_dir=str(tmp_path / "here"), run_name="a")
    return Config(train=train, ckpt=CkptOptions(mirror=f"file://{tmp_path}/mirror/", keep_last=1, keep_best=True))


def save_steps(config, steps) -> RunFolder:
    """Return the folder of a run that has saved after these steps; the first one was the best."""
    folder = run_folder(config)
    folder.write_records(config, None)
    with mirror_sync.mirror_run(config, folder) as mirror:
        checkpoints = CheckpointManager(folder.checkpoints, 1, mirror)
        for step in steps:
            checkpoints.save(step, {"x": jnp.ones(3)}, {"standing": {"step": steps[0]}}, best=steps[0])
        checkpoints.wait(final=True)
    return folder


def fetch_steps(config, name="there") -> list[int]:
    """Return the steps of the checkpoints that another machine fetches before it begins."""
    home = f"{run_folder(config).path.parent.parent / name}"
    moved = dataclasses.replace(config, train=dataclasses.replace(config.train, output_dir=home))
    folder = run_folder(moved)
    folder.path.mkdir(parents=True, exist_ok=True)
    with mirror_sync.mirror_run(moved, folder) as mirror:
        checkpoints = CheckpointManager(folder.checkpoints, 1, mirror)
        mirror_sync.fetch(moved, folder, mirror, checkpoints)
        mirror_sync.remove_overwritten(moved, mirror)
        return checkpoints.steps()


def resuming(config, how):
    return dataclasses.replace(config, ckpt=dataclasses.replace(config.ckpt, resume=how))


def test_the_best_checkpoint_comes_with_the_newest(config):
    save_steps(config, [2, 4, 6])
    assert fetch_steps(config) == [2, 6]


@pytest.fixture
def lines():
    """Collect the log, whichever handlers other tests have left."""
    logged, logger = [], logging.getLogger("jaxtune")
    handler, level = logging.Handler(), logger.level
    handler.emit = lambda record: logged.append(record.getMessage())
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield logged
    logger.removeHandler(handler)
    logger.setLevel(level)


def test_what_is_here_comes_first_and_that_there_is_more_there_is_said(config, lines):
    folder = save_steps(config, [2, 4])
    with mirror_sync.mirror_run(config, folder) as mirror:
        for step in (2, 4):
            (folder.checkpoints / str(step)).rename(folder.path / str(step))
        (folder.path / "2").rename(folder.checkpoints / "2")
        mirror_sync.fetch(config, folder, mirror, CheckpointManager(folder.checkpoints))
        (folder.path / "4").rename(folder.checkpoints / "4")
    assert "has a checkpoint of step 4, but the run continues from the local ones" in "\n".join(lines)


def test_another_run_there_is_left_alone(config):
    save_steps(config, [2, 4])
    another = dataclasses.replace(config, train=dataclasses.replace(config.train, seed=7))
    with pytest.raises(UserError, match="mirror/a holds another run, with other values of train.seed"):
        fetch_steps(another)
    with pytest.raises(UserError, match="mirror/a holds a run and ckpt.resume is 'never'"):
        fetch_steps(resuming(config, "never"))
    with pytest.raises(UserError, match=r"mirror/a has no checkpoint of step 3, only of \[2, 4\]"):
        fetch_steps(resuming(config, 3))
    assert fetch_steps(resuming(config, 2)) == [2]
    assert fetch_steps(resuming(another, "overwrite"), "anew") == []
    assert fetch_steps(config, "after") == []


def test_how_it_ended_is_said(config, lines, monkeypatch):
    save_steps(config, [2])
    assert lines[-1] == f"mirror:   {config.ckpt.mirror}a"
    monkeypatch.setattr("jaxtune.checkpoint.storage.RemoteFolder.put", lambda *_: (_ for _ in ()).throw(OSError("off")))
    save_steps(config, [4])
    assert lines[-1].startswith("mirror:   checkpoint 4 was not copied to ")
    assert lines[-1].endswith(" off; the same command again copies what is missing")
