"""The files of a run folder."""

import dataclasses
import json
import os

import pytest

from jaxtune.config.schema import Config, TrainOptions
from jaxtune.data import Counts
from jaxtune.errors import UserError
from jaxtune.host.run_folder import RunFolder


def test_the_recorded_config_is_replaced_at_once(tmp_path, monkeypatch):
    """A run that is killed while it writes leaves the earlier config, from which it can be resumed."""
    folder = RunFolder(tmp_path)
    folder.write_records(Config(train=TrainOptions(max_steps=3)), None)

    def killed(file):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "fsync", killed)
        folder.write_records(Config(train=TrainOptions(max_steps=5)), None)
    assert folder.read_config().train.max_steps == 3
    folder.write_records(Config(train=TrainOptions(max_steps=5)), None)
    assert folder.read_config().train.max_steps == 5 and [file.name for file in tmp_path.iterdir()] == ["config.json"]


def test_counts_that_an_older_version_recorded_are_read(tmp_path):
    """It counted no images."""
    folder, counts = RunFolder(tmp_path), Counts(3, 60, 50, 0, 0, 0, 0, 0, 0, 2, 0.9)
    recorded = dataclasses.asdict(counts)
    older = {name: value for name, value in recorded.items() if "patch" not in name and name != "images"}
    folder.counts.write_text(json.dumps(older))
    assert len(older) == 11 and folder.read_counts() == counts
    folder.counts.write_text(json.dumps(older | {"patches": "4"}))
    with pytest.raises(UserError, match="patches is"):
        folder.read_counts()
