"""What a process sets before the first device is touched."""

import os

import pytest

from jaxtune.config.schema import Config
from jaxtune.run import process


@pytest.mark.parametrize("own", ["", "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"])
def test_xla_takes_almost_all_of_a_gpu_unless_the_user_says_how_much(monkeypatch, own):
    """Both names at once are an error of XLA's client."""
    names = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
    for name in names:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    if own:
        monkeypatch.setenv(own, "0.5")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "/nowhere")
    monkeypatch.setattr(process.multihost, "initialize", lambda: None)
    monkeypatch.setattr(process, "_show_log", lambda: None)
    process.configure(Config())
    found = {name: os.environ[name] for name in names if name in os.environ}
    assert found == ({own: "0.5"} if own else {"XLA_CLIENT_MEM_FRACTION": "0.93"})
