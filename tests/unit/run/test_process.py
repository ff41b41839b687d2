"""What a process sets before the first device is touched."""

import os

import jax
import pytest

from jaxtune.config.schema import Config, Data, Dataset, Train
from jaxtune.errors import UserError
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


def test_processes_must_have_the_same_options_code_and_jax():
    same = process.facts(Config())
    assert same == process.facts(Config())
    assert same["jax"] == jax.__version__ and {"jaxlib", "code of jaxtune"} < {*same}
    other = process.facts(Config(train=Train(seed=3), data=Data(datasets=(Dataset(path="a.jsonl"),))))
    assert other["train.seed"] == "3" != same["train.seed"] and other["data.datasets.0.path"] == "'a.jsonl'"


def test_processes_that_differ_do_not_start(monkeypatch):
    monkeypatch.setattr(process.multihost, "initialize", lambda: None)
    monkeypatch.setattr(process, "_show_log", lambda: None)
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "/nowhere")
    monkeypatch.setattr(jax, "process_count", lambda: 2)

    def differ(facts):
        raise UserError(f"train.seed: {facts['train.seed']}")

    monkeypatch.setattr(process.multihost, "agree", differ)
    with pytest.raises(UserError, match="train.seed: 3"):
        process.configure(Config(train=Train(seed=3)))


def test_the_code_is_its_names_and_its_content(tmp_path):
    def code():
        return process.digest([tmp_path])

    (tmp_path / "a.py").write_text("x = 1")
    before = code()
    (tmp_path / "data.json").write_text("{}")
    assert code() == before
    (tmp_path / "a.py").write_text("x = 2")
    changed = code()
    (tmp_path / "a.py").rename(tmp_path / "b.py")
    assert len({before, changed, code()}) == 3
