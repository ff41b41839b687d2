"""The files of a run folder."""

from pathlib import Path

import pytest

from jaxtune.config.schema import Config, TrainOptions
from jaxtune.host.run_folder import RunFolder


def test_the_recorded_config_is_replaced_at_once(tmp_path, monkeypatch):
    """A run that is killed while it writes leaves the earlier config, from which it can be resumed."""
    folder = RunFolder(tmp_path)
    folder.write_records(Config(train=TrainOptions(max_steps=3)), None)

    def killed(path, text):
        with path.open("w") as file:
            file.write(text[: len(text) // 2])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "write_text", killed)
        folder.write_records(Config(train=TrainOptions(max_steps=5)), None)
    assert folder.read_config().train.max_steps == 3
    folder.write_records(Config(train=TrainOptions(max_steps=5)), None)
    assert folder.read_config().train.max_steps == 5 and [file.name for file in tmp_path.iterdir()] == ["config.json"]
