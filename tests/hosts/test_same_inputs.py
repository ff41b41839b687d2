"""Hosts with files of their own train only if the files have the same content."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from runs import recipe, write_conversations
from tiny import write_model_folder

from jaxtune.config.schema import Config
from jaxtune.parallel import multihost
from jaxtune.weights.same_inputs import check_same_inputs

ROOT = Path(__file__).parents[2]


def train_on_two_hosts(home: Path, *options: str) -> tuple[int, str]:
    """Train in two processes with the folders host0 and host1; return the exit code and what process 0 has shown."""
    command = f"cd host$JAXTUNE_PROCESS_ID && exec {sys.executable} -m jaxtune.train --config={recipe(home)}"
    settings = {
        "model.path": "model",
        "data.datasets[0].path": "chat.jsonl",
        "train.max_steps": 1,
        "data.cache_dir": "cache",
    }
    given = [f"'--config.{name}={value}'" for name, value in settings.items()] + [f"--config.{one}" for one in options]
    launch = [sys.executable, "-m", "jaxtune.launch", "--processes=2", "--devices-per-process=1", "--grace=0"]
    done = subprocess.run(
        [*launch, f"--log-dir={home / 'logs'}", "--", "sh", "-c", " ".join([command, *given])],
        cwd=home,
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"},
        capture_output=True,
        timeout=300,
    )
    return done.returncode, (home / "logs/process-0.log").read_text()


def write_hosts(home: Path, *sizes: int) -> None:
    for host, hidden_size in enumerate(sizes):
        write_model_folder(home / f"host{host}/model", hidden_size=hidden_size)
        write_conversations(home / f"host{host}/chat.jsonl")


def test_hosts_with_other_data_or_another_model_are_refused(tmp_path):
    """Otherwise a run would be a mixture of both, with a loss that looks right."""
    write_hosts(tmp_path, 32, 32)
    weights = tmp_path / "host1/model/model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    write_conversations(tmp_path / "host1/chat.jsonl", count=61)
    code, shown = train_on_two_hosts(tmp_path)
    assert code == 2, shown
    message = shown.partition("the processes of this run differ:\n")[2].splitlines()
    options = ["data.datasets", "validation data", "model.path"]
    for option, line in zip(options, message, strict=False):
        assert line.startswith(f"  {option}: ") and " in process 0; " in line and line.endswith("in process 1"), line
    assert message[len(options)].startswith("put the same files on all hosts")


def test_the_place_of_a_model_does_not_matter(tmp_path, monkeypatch):
    """The hub's cache may be elsewhere on each host."""
    write_hosts(tmp_path, 32, 32)
    compared: list[dict[str, str]] = []
    monkeypatch.setattr("jax.process_count", lambda: 2)
    monkeypatch.setattr(multihost, "agree", lambda facts, advice: compared.append(facts))
    for folder in (tmp_path / "host0/model", tmp_path / "host1/model"):
        model: Any = SimpleNamespace(folder=folder, folders=SimpleNamespace(config=folder))
        check_same_inputs({"data.datasets": "a"}, {}, {"model.path": (model, Config())})
    assert compared[0] == compared[1] and compared[0].keys() == {"data.datasets", "model.path"}


@pytest.mark.nightly
@pytest.mark.parametrize("option", ["data.streaming=False", "data.streaming=True"])
def test_hosts_may_have_copies_of_the_same_files(tmp_path, option):
    write_hosts(tmp_path, 32, 32)
    os.utime(tmp_path / "host1/chat.jsonl", (0, 0))  # copied at another time
    (tmp_path / "host1/model/other.safetensors").write_bytes(b"")  # a file that no program reads
    code, shown = train_on_two_hosts(tmp_path, option, "data.validation_split=0.0", "eval.steps=None")
    assert code == 0, shown
