"""Whole runs of the command line, in separate processes or in this one, on a tiny model and a little text."""

import contextlib
import importlib
import io
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import jax
from tiny import write_model_folder

from jaxtune.parallel import mesh as meshes

CONFIGS = Path(__file__).parents[1] / "configs"
RECIPE = """
from jaxtune.config import dataset, new_config

def get_config(arg=None):
    config = new_config()
    config.model.path = {model!r}
    config.model.dtype = "float32"
    config.precision.recipe = "fp32"
    config.data.datasets = (dataset(path={data!r}),)
    config.data.validation_split = 0.1
    config.data.seq_len = 64
    config.train.output_dir = {output!r}
    config.train.max_steps = 24
    config.train.micro_batch_size = 4
    config.optim.learning_rate = 1e-2
    config.optim.warmup_steps = 2
    config.ckpt.save_steps = 4
    config.eval.steps = 8
    config.memory.remat = "none"
    if {lora!r}:
        config.lora.enabled = True
        config.lora.rank = 4
        config.lora.dropout = 0.1
    return config
"""


def write_conversations(path: Path, count: int = 60) -> Path:
    """Write a jsonl of short question-and-answer conversations of different lengths."""
    rng = random.Random(0)
    with path.open("w") as file:
        for i in range(count):
            words = " ".join(rng.choice(["red", "green", "blue"]) for _ in range(rng.randint(1, 6)))
            messages = [{"role": "user", "content": f"say {i}"}, {"role": "assistant", "content": words}]
            file.write(json.dumps({"messages": messages}) + "\n")
    return path


def write_answers(path: Path, count: int = 60, paired: bool = True) -> Path:
    """Write a jsonl of prompts with a better (colours) and a worse (numbers) answer, or with one labelled answer."""
    rng = random.Random(0)
    words = {"chosen": ["red", "green", "blue"], "rejected": ["one", "two", "three", "four"]}
    with path.open("w") as file:
        for i in range(count):
            pair = {side: " ".join(rng.choices(known, k=rng.randint(1, 4))) for side, known in words.items()}
            side = ("chosen", "rejected")[i % 2]
            answer = pair if paired else {"completion": pair[side], "label": side == "chosen"}
            file.write(json.dumps({"prompt": f"say {i}"} | answer) + "\n")
    return path


def recipe(folder: Path, lora: bool = False) -> Path:
    """Write a recipe file, its model and its data to `folder`."""
    model = folder / "model"
    if not model.exists():
        write_model_folder(model)
        write_conversations(folder / "chat.jsonl")
    path = folder / ("tiny_lora.py" if lora else "tiny.py")
    fields = {"model": str(model), "data": str(folder / "chat.jsonl"), "output": str(folder / "runs"), "lora": lora}
    path.write_text(RECIPE.format(**fields))
    return path


def recipe_command(home: Path, recipe: str, name: str, **options) -> list[str]:
    """Return the command that trains a recipe of configs/ on home/model and home/chat.jsonl, fit for two cores."""
    options = {
        "data.datasets[0].path": home / "chat.jsonl",
        "data.datasets[0].type": "conversation",
        "data.validation_split": 0.1,
        "data.seq_len": 64,
        "train.output_dir": home / "runs",
        "train.run_name": name,
        "train.max_steps": 8,
        "train.grad_accum_steps": 2,
        "ckpt.save_steps": 2,
        "optim.learning_rate": 1e-2,
        **options,
    }
    settings = [f"--config.{key}={value}" for key, value in options.items()]
    return ["jaxtune.train", f"--config={CONFIGS / recipe}:{home / 'model'}", *settings]


def start(*arguments: str, devices: int = 1, environment: dict[str, str] | None = None) -> subprocess.Popen:
    """Start `python -m arguments` on simulated CPU devices, without LLVM's optimisations by default."""
    variables = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices), "HF_HUB_OFFLINE": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", *map(str, arguments)],
        env={"JAX_DISABLE_MOST_OPTIMIZATIONS": "1", **os.environ, **variables, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run(*arguments: str, devices: int = 1, code: int = 0, environment: dict[str, str] | None = None) -> str:
    """Return the output of such a process; its exit code must be `code`."""
    process = start(*arguments, devices=devices, environment=environment)
    output, _ = process.communicate(timeout=600)
    assert process.returncode == code, output
    return output


def call(module: str, *arguments, devices: int = 1, code: int = 0) -> str:
    """Call a command in this process on `devices` devices and return its output; its exit code must be `code`."""
    command = importlib.import_module(module)
    make = lambda mesh, chosen=None, **more: meshes.make_mesh(mesh, (chosen or jax.devices())[:devices], **more)  # noqa: E731
    with contextlib.ExitStack() as stack:
        printed = stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        stack.enter_context(contextlib.redirect_stderr(printed))
        if hasattr(command, "make_mesh"):
            stack.enter_context(mock.patch.object(command, "make_mesh", make))
        returned = command.main([str(argument) for argument in arguments])
    assert returned == code, printed.getvalue()
    assert "Traceback" not in printed.getvalue()
    return printed.getvalue()


def wait_for_step(process, folder: Path, step: int) -> None:
    """Wait until metrics.jsonl has a row of this step, or the process has ended."""
    deadline = time.monotonic() + 300
    while process.poll() is None and time.monotonic() < deadline:
        file = folder / "metrics.jsonl"
        if file.exists() and f'"step": {step},' in file.read_text():
            return
        time.sleep(0.005)


def metrics(folder: Path) -> list[dict]:
    """Return the rows of metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses(folder: Path) -> list[tuple]:
    """Return the numbers of a run that must not depend on when it was interrupted, to the last bit."""
    keys = ("step", "loss", "eval_loss", "grad_norm", "learning_rate", "tokens", "target_tokens")
    return [tuple(repr(row.get(key)) for key in keys) for row in metrics(folder)]
