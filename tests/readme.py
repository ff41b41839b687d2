"""The commands of the README, in order, in an empty folder with the wheel installed."""

import contextlib
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pages import ROOT, blocks
from runs import run, write_answers, write_conversations, write_model_folder

README = ROOT / "README.md"
# Attention over the recipes' 2048 or 4096 positions takes minutes on a CPU, and so do 512 tokens of each completion.
SHORTER = {
    "qwen_": ("--config.data.seq_len=256",),
    "qwen_grpo": ("--config.rollout.max_new_tokens=32",),
    "_pretrain_": ("--config.train.max_steps=2", "--config.optim.warmup_steps=1", "--config.optim.cooldown_steps=1"),
}
SIZES = dict(hidden_size=64, intermediate_size=128, head_dim=32, max_position_embeddings=4096)  # whole blocks of 64
TOGETHER = """
import json
from pathlib import Path
from runs import call

outputs = [call(*command) for command in json.loads(Path("commands.json").read_text())]
Path("outputs.json").write_text(json.dumps(outputs))
"""
TRAININGS = ("jaxtune.train --config=quickstart", "jaxtune.train --config=quickstart_lora")


@contextlib.contextmanager
def empty_folder(made: pytest.TempPathFactory) -> Iterator[Path]:
    """Change to a folder that has only the models and data that the README assumes, with the wheel on PYTHONPATH."""
    source, wheel, folder = (made.mktemp(name) for name in ("source", "wheel", "home"))
    for name in ("jaxtune", "pallas_kernels"):
        shutil.copytree(ROOT / name, source / name)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(wheel), str(source)]
    subprocess.run(pip, check=True, timeout=300)
    for name in ("Qwen3-0.6B", "Qwen3-8B"):
        write_model_folder(folder / "Qwen" / name, **SIZES)
    write_conversations(folder / "chats.jsonl", 200)
    write_answers(folder / "pairs.jsonl")
    prompts = ({"prompt": f"say {i}", "answer": str(i)} for i in range(8))
    (folder / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    (folder / "texts").mkdir()
    for i in range(200):
        (folder / "texts" / f"{i}.txt").write_text("the quick brown fox jumps over the lazy dog. " * (i % 9 + 1))
    for block in blocks(README.read_text("utf-8")):
        if block.kind == "file":
            (folder / block.about).write_text(block.code)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("PYTHONPATH", str(wheel))
        patch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")  # the README calls `python`
        imported = subprocess.check_output([sys.executable, "-c", "import jaxtune; print(jaxtune.__file__)"], text=True)
        assert Path(imported.strip()).is_relative_to(wheel)
        yield folder


def run_python() -> str:
    """Return the output of the Python code in the README."""
    (code,) = written("python")
    Path("from_readme.py").write_text(code)
    return run("from_readme")


def written(language: str) -> list[str]:
    """Return the README's blocks of a language that are to be run."""
    found = blocks(README.read_text("utf-8"))
    return [block.code for block in found if (block.kind, block.language) == ("run", language)]


def run_commands(*trained_with: str) -> dict[str, str]:
    """Return the output of each command in the README, by its arguments; quickstart trainings get `trained_with` too.

    The other trainings are shortened (SHORTER), and one process calls all commands but the first. Without
    `trained_with`, each has a process, and the quickstart is compiled with LLVM's optimisations, as for a user.
    """
    lines = [line for code in written("bash") for line in code.replace("\\\n", "").splitlines()]
    names = [line.removeprefix("pip install -e . && ").removeprefix("python -m ") for line in lines]
    assert set(TRAININGS) < set(names) and all(name.startswith("jaxtune.") for name in names)
    commands = [[*shlex.split(name), *shorter(name, trained_with)] for name in names]
    if not trained_with:
        levels = ({"JAX_DISABLE_MOST_OPTIMIZATIONS": str(int(name not in TRAININGS))} for name in names)
        return {name: run(*command, environment=level) for name, command, level in zip(names, commands, levels)}
    return dict(zip(names, [run(*commands[0]), *call_together(commands[1:])], strict=True))


def shorter(command: str, trained_with: tuple[str, ...]) -> tuple[str, ...]:
    """Return the options that make a command of the README shorter."""
    if any(training in command for training in TRAININGS):
        return trained_with
    return tuple(option for name, options in SHORTER.items() if name in command for option in options)


def call_together(commands: list[list[str]]) -> list[str]:
    """Return the outputs of commands that one process calls: every process imports for seconds."""
    Path("together.py").write_text(TOGETHER)
    Path("commands.json").write_text(json.dumps(commands))
    run("together", environment={"PYTHONPATH": os.pathsep.join([os.environ["PYTHONPATH"], str(ROOT / "tests")])})
    return json.loads(Path("outputs.json").read_text())
