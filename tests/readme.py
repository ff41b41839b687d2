"""The commands of the README, in order, in an empty folder with the wheel installed."""

import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from runs import run, write_answers, write_conversations, write_model_folder

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
SHORT_ROWS = ("--config.data.seq_len=256",)
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
    """Change to a folder that has only the model and data that the README assumes, with the wheel on PYTHONPATH."""
    source, wheel, folder = (made.mktemp(name) for name in ("source", "wheel", "home"))
    for name in ("jaxtune", "pallas_kernels"):
        shutil.copytree(ROOT / name, source / name)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(wheel), str(source)]
    subprocess.run(pip, check=True, timeout=300)
    for name in ("model", "teacher"):
        write_model_folder(folder / "my" / name, max_position_embeddings=4096)
    write_conversations(folder / "chats.jsonl", 200)
    write_conversations(folder / "held_out.jsonl", 8)
    write_answers(folder / "pairs.jsonl")
    prompts = ({"prompt": f"say {i}", "answer": str(i)} for i in range(8))
    (folder / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    (code,) = re.findall(r"^```python\n(def right.*?)^```", README.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    (folder / "my_rewards.py").write_text(code)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("PYTHONPATH", str(wheel))
        patch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")  # the README calls `python`
        imported = subprocess.check_output([sys.executable, "-c", "import jaxtune; print(jaxtune.__file__)"], text=True)
        assert Path(imported.strip()).is_relative_to(wheel)
        yield folder


def run_python() -> str:
    """Return the output of the Python code in the README."""
    (code,) = re.findall(r"^```python\n(import jaxtune\n.*?)^```", README.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    Path("from_readme.py").write_text(code)
    return run("from_readme")


def run_commands(*trained_with: str) -> dict[str, str]:
    """Return the output of each command in the README, by its arguments; quickstart trainings get `trained_with` too.

    Other trainings then have short rows: attention over the recipes' 2048 or 4096 positions takes minutes on a CPU. And
    between the first command and the last, which starts processes itself, one process calls them all.
    Without `trained_with`, each has a process, and the trainings are compiled with LLVM's optimisations, as for a user.
    """
    text = README.read_text(encoding="utf-8")
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    commands = [block for language, block in blocks if not language]  # pip's and SLURM's too, left out below
    lines = [line for block in commands for line in block.replace("\\\n", "").splitlines()]
    written = [line.partition("python -m ")[2] for line in lines if "python -m jaxtune" in line]
    written = [command for command in written if "jaxtune.plan" not in command]  # needs the extra `aot`: tests/aot
    assert set(TRAININGS) < set(written)
    if not trained_with:
        levels = ({"JAX_DISABLE_MOST_OPTIMIZATIONS": str(int(command not in TRAININGS))} for command in written)
        return {command: run(*shlex.split(command), environment=level) for command, level in zip(written, levels)}
    first, *between, last = ([*shlex.split(command), *shorter(command, trained_with)] for command in written)
    assert last[0] == "jaxtune.launch"
    return dict(zip(written, [run(*first), *call_together(between), run(*last)], strict=True))


def shorter(command: str, trained_with: tuple[str, ...]) -> tuple[str, ...]:
    """Return the options that make a command of the README shorter."""
    if any(training in command for training in TRAININGS):
        return trained_with
    return SHORT_ROWS if "my/model" in command and "data.seq_len" not in command else ()


def call_together(commands: list[list[str]]) -> list[str]:
    """Return the outputs of commands that one process calls: every process imports for seconds."""
    Path("together.py").write_text(TOGETHER)
    Path("commands.json").write_text(json.dumps(commands))
    run("together", environment={"PYTHONPATH": os.pathsep.join([os.environ["PYTHONPATH"], str(ROOT / "tests")])})
    return json.loads(Path("outputs.json").read_text())
