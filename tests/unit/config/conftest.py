"""Fixtures for tests of the config."""

import pytest

from jaxtune.config import dataset, new_config


@pytest.fixture
def base():
    """Return a recipe's config with every required option set."""
    config = new_config()
    config.model.path = "folder"
    config.data.datasets = (dataset(path="a.jsonl"), dataset(path="b.jsonl"))
    return config


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
