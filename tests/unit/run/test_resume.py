"""Messages of a run about options that changed since its checkpoint, and about checkpoints that are gone."""

import dataclasses
import json
from types import SimpleNamespace
from typing import Any

import pytest

from jaxtune.checkpoint import CheckpointManager
from jaxtune.config import to_json
from jaxtune.config.schema import CkptOptions, Config, DataOptions, Dataset, ModelOptions, TrainOptions
from jaxtune.errors import UserError
from jaxtune.host.run_folder import RunFolder
from jaxtune.objectives.options import RolloutOptions
from jaxtune.optim.options import OptimOptions
from jaxtune.run.resume import Saved, begin, check_not_lost, check_same, check_unchanged, saved_run


def test_the_fields_of_datasets_that_differ_are_named_alone(tmp_path):
    data = DataOptions(datasets=(Dataset(path="a", type="text"), Dataset(path="b")))
    then = Config(data=data, train=TrainOptions(max_steps=3))
    changed = DataOptions(datasets=(Dataset(path="c", type="text"),), eval_datasets=data.eval_datasets)
    with pytest.raises(UserError) as error:
        check_unchanged(_as_saved(then), dataclasses.replace(then, data=changed), RunFolder(tmp_path))
    assert str(error.value).splitlines()[1:3] == [
        "  data.datasets[0].path: 'a' then, 'c' now",
        "  data.datasets[1].path: 'b' then, None now",
    ]
    assert len(str(error.value).splitlines()) == 4
    allowed = dataclasses.replace(data, on_bad_row="skip")  # after a bad sample has ended the run of a stream
    now = dataclasses.replace(then, train=TrainOptions(max_steps=9), data=allowed)
    check_unchanged(_as_saved(then), now, RunFolder(tmp_path))


def test_servers_may_be_elsewhere_when_a_run_continues(tmp_path):
    """A scheduler that starts the run again may also give its server another host."""

    def config(server: str | None, **rollout) -> Config:
        return Config(rollout=RolloutOptions(("r.py:r",), server=server, **rollout))

    then, folder = _as_saved(config("http://a:8000")), RunFolder(tmp_path)
    check_unchanged(then, config("http://b:8000,http://c:8000", server_seconds=9, completions_at_once=4), folder)
    with pytest.raises(UserError, match="rollout.server: 'http://a:8000' then, None now"):
        check_unchanged(then, config(None), folder)


@pytest.mark.parametrize(
    ("then", "now", "said"),
    [({"": "a"}, {"": "b"}, ["the validation data changed"]), ({"x": "a"}, {"x": "a"}, []), (None, {"x": "a"}, [])]
    + [({"x": "a", "y": "b"}, {"x": "a", "y": "c"}, ["the validation data y changed"])],
)
def test_validation_data_that_changed_is_said(caplog, then, now, said):
    feed = SimpleNamespace(documents=SimpleNamespace(has_key=lambda key: True))
    record = {"rows_per_step": 4, "total_steps": 8, "data": "", "base": {}}
    saved = record if then is None else record | {"eval_data": then}
    check_same(saved, record | {"eval_data": now}, None, feed)
    assert [message.split(" since")[0] for message in caplog.messages] == said


@pytest.mark.parametrize(
    ("step", "train", "said"),
    [
        (6, TrainOptions(max_steps=6), "6 of 6 steps"),
        (4, TrainOptions(max_steps=9), "4 of 9 steps"),
        (6, TrainOptions(max_steps=2), "it has 6 steps, and train.max_steps is 2"),
        (6, TrainOptions(epochs=0.5), "it has 6 steps, and train.epochs is 0.5, 2 steps"),
    ],
)
def test_how_far_a_finished_run_is(tmp_path, step, train, said):
    assert Saved(CheckpointManager(tmp_path), None, {"step": step}).progress(train, train.max_steps or 2) == said


@pytest.fixture
def saved(tmp_path):
    """A run that has saved a checkpoint of step 3, on another disk."""
    folder, elsewhere = RunFolder(tmp_path / "run"), tmp_path / "disk" / "run"
    (elsewhere / "3").mkdir(parents=True)
    (elsewhere / "3" / "manifest.json").touch()
    folder.path.mkdir()
    folder.checkpoints.symlink_to(elsewhere)
    folder.metrics.write_text('{"step": 5}\n')
    folder.note_checkpoint(3)
    return folder


@pytest.mark.parametrize(
    ("lose", "options", "said"),
    [
        (lambda run: (run.checkpoints / "3" / "manifest.json").unlink(), {}, "has only 3 without manifest.json"),
        (
            lambda run: (run.path.parent / "disk").rename(run.path / "away"),
            {},
            "is a link to .*/disk/run, which is not",
        ),
        (
            lambda run: (run.path.parent / "disk").rename(run.path / "away"),
            {"dir": "disk"},
            "is a link to .*/disk/run, which is not there, so",
        ),
        (
            lambda run: (run.path.parent / "disk").rename(run.path / "away"),
            {"dir": "other"},
            "/disk/run, which is not there, and .*/other/run is not there, so",
        ),
        (lambda run: run.checkpoints.unlink(), {}, "run/checkpoints is not there"),
        (lambda run: (run.checkpoints / "3").rename(run.path / "away"), {"resume": "never"}, "checkpoints is empty"),
    ],
)
def test_a_run_whose_checkpoints_are_gone_does_not_start_afresh(saved, monkeypatch, lose, options, said):
    """Unless that is what the user wants: its metrics and its export would be replaced."""
    monkeypatch.chdir(saved.path.parent)
    check_not_lost(Config(ckpt=CkptOptions(**options)), saved, None)
    lose(saved)
    with pytest.raises(UserError, match=rf"saved a checkpoint of step 3 in {saved.path.parent}/disk/run, but .*{said}"):
        check_not_lost(Config(ckpt=CkptOptions(**options)), saved, None)
    afresh = Config(ckpt=CkptOptions(resume="overwrite"))
    check_not_lost(afresh, saved, None)
    begin(afresh, saved, None)
    check_not_lost(Config(), saved, None)
    assert not saved.checkpoints.is_symlink() or saved.checkpoints.is_dir()  # so that the new run can save


def test_damage_comes_with_the_advice_to_start_afresh_only_for_the_run_itself(saved):
    """ckpt.resume=overwrite would remove this run, and not mend the run that ckpt.start names."""
    with pytest.raises(UserError, match="are damaged; to start afresh, set --config.ckpt.resume=overwrite$"):
        saved_run(Config(), saved, CheckpointManager(saved.checkpoints))
    fresh, start = RunFolder(saved.path.parent / "fresh"), CkptOptions(start=str(saved.path))
    with pytest.raises(UserError, match="are damaged$"):
        saved_run(Config(ckpt=start), fresh, CheckpointManager(fresh.checkpoints))


def test_a_run_starts_from_another_with_another_learning_rate_but_not_with_another_model(tmp_path, monkeypatch):
    then = _as_saved(Config(train=TrainOptions(max_steps=3)))
    monkeypatch.setattr(CheckpointManager, "host", lambda self, step=None: {"config": then, "step": 3})
    fresh, start = RunFolder(tmp_path / "fresh"), CkptOptions(start=str(tmp_path / "old"))
    config = Config(ckpt=start, optim=OptimOptions(learning_rate=0.5), train=TrainOptions(max_steps=9))
    checkpoints = SimpleNamespace(host=lambda step: None)
    started: Any = saved_run(config, fresh, checkpoints)  # pyright: ignore
    assert started.record["step"] == 3 and not started.own
    with pytest.raises(UserError, match=r"started with other options:\n  model.dtype: .*\nset them back \(only.*optim"):
        saved_run(dataclasses.replace(config, model=ModelOptions(dtype="float16")), fresh, checkpoints)  # pyright: ignore


def test_checkpoints_in_the_mirror_or_moved_to_another_disk_are_not_lost(saved):
    mirror: Any = lambda steps: SimpleNamespace(steps=lambda: steps)  # noqa: E731
    disk = (saved.path.parent / "disk").rename(saved.path.parent / "larger")
    check_not_lost(Config(ckpt=CkptOptions(dir=str(disk))), saved, None)
    check_not_lost(Config(), saved, mirror([3]))
    with pytest.raises(UserError, match="which is not there"):
        check_not_lost(Config(), saved, mirror([]))
    saved.last_checkpoint.unlink()  # a run of an older version has no record: only the link tells
    for options in (CkptOptions(), CkptOptions(dir=str(saved.path.parent / "disk"))):
        with pytest.raises(UserError, match="^.*run/checkpoints is a link to .*, which is not there, so"):
            check_not_lost(Config(ckpt=options), saved, None)


def test_a_run_that_was_killed_before_its_first_checkpoint_was_complete_starts_again_and_says_so(tmp_path, caplog):
    folder = RunFolder(tmp_path)
    check_not_lost(Config(), folder, None)
    assert not caplog.messages
    (folder.checkpoints / "3").mkdir(parents=True)
    folder.metrics.write_text('{"step": 4}\n{"step": 5}\n')
    check_not_lost(Config(), folder, None)
    assert caplog.messages == [
        f"starting again from step 0: {tmp_path} took 5 steps and has no complete checkpoint",
    ]


def _as_saved(config: Config) -> dict:
    return json.loads(to_json(config))
