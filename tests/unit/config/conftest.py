"""What tests of the config start from."""

import pytest

from jaxtune.config import dataset, new_config


@pytest.fixture
def base():
    """A recipe's config that lacks nothing."""
    config = new_config()
    config.model.path = "folder"
    config.data.datasets = (dataset(path="a.jsonl"), dataset(path="b.jsonl"))
    return config
