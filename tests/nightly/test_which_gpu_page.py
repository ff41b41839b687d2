"""The commands of docs/guides/which_gpu.md run unchanged, on tiny models under the names that the page uses."""

import json
import re
import shlex
from pathlib import Path

import pytest
from pages import blocks
from runs import call, metrics, write_model_folder

# Its rows of 2048 tokens are long for a CPU.
COVERS = ("docs/guides/which_gpu.md", "jaxtune/recipes")
PAGE = (Path(__file__).parents[2] / "docs" / "guides" / "which_gpu.md").read_text(encoding="utf-8")
COMMANDS = [block.code.replace("\\\n", "") for block in blocks(PAGE) if block.code.startswith("jaxtune train ")]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Return a folder with the model of the page and rows of instructions."""
    folder = tmp_path_factory.mktemp("home")
    sizes = dict(hidden_size=64, intermediate_size=128, head_dim=32, max_position_embeddings=2048)
    write_model_folder(folder / "Qwen" / "Qwen3-8B", **sizes)
    rows = [{"instruction": f"count to {i}", "output": " ".join(map(str, range(i)))} for i in range(100, 150)]
    (folder / "my.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: re.search(r"config=(\w+)", command)[1])
def test_a_command_trains_as_it_stands(home, monkeypatch, command):
    monkeypatch.chdir(home)
    _, name, *arguments = shlex.split(command)
    call(f"jaxtune.{name}", *arguments, devices=8 if "--config.mesh.fsdp=8" in arguments else 1)
    run = re.search(r"config=(\w+)", command)[1]
    assert metrics(home / "runs" / run)[-1]["eval_loss"] < 6


def test_the_page_has_commands():
    assert len(COMMANDS) == 3
