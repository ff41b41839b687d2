"""The wheel in a fresh virtual environment, without the repository, as a user has it."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from runs import metrics, write_conversations, write_model_folder

ROOT = Path(__file__).parents[2]
SMALL = ("--config.train.max_steps=3", "--config.eval.max_batches=1")
PLUGIN = """
def on_step(run, step, metrics):
    run.state["losses"] = [*run.state.get("losses", []), metrics["loss"]]

def on_end(run, step):
    (run.folder / "mine.txt").write_text(str(run.state["losses"]))
"""
CELLS = (
    """import jaxtune

config = jaxtune.config_of(
    "qwen_lora:my/model",
    data={"datasets": [{"path": "chats.jsonl"}], "validation_split": 0.1, "seq_len": 64},
    train={"max_steps": 6, "grad_accum_steps": 1},
)
run = jaxtune.train(config)""",
    """again = jaxtune.train(config, train={"run_name": "again"}, ckpt={"save_steps": 0, "at_end": False})
found = {
    "equal": [run.last[name] == again.last[name] for name in ("loss", "eval_loss")],
    "evaluated": [made.evaluate()["eval_loss"] - run.last["eval_loss"] for made in (run, again)],
    "steps": run.metrics["loss"].at["step"].tolist(),
    "made": [
        made.generate(["say 1", [{"role": "user", "content": "say 2"}]], max_new_tokens=4, temperature=0)
        for made in (run, again)
    ],
    "folder": [str(run.folder), str(run.model)],
}
import json; print(json.dumps(found))""",
    """jaxtune.train("qwen_lora:my/model", optim={"lr": 1e-4})""",
)


def execute(*command: str, code: int = 0) -> str:
    """Run a command in a user's environment, without variables of this project, and return its output."""
    ours = ("PYTHONPATH", "VIRTUAL_ENV", "JUPYTER_PATH", "JUPYTER_CONFIG_DIR", "XLA_FLAGS")
    variables = {name: value for name, value in os.environ.items() if name not in ours}
    variables |= {"JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    done = subprocess.run(
        command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600
    )
    assert done.returncode == code, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def bin(tmp_path_factory):
    """Build the wheel and install it in a fresh environment; yield its `bin`, in a folder with a model and data."""
    source, wheels, fresh, home = (tmp_path_factory.mktemp(name) for name in ("source", "wheels", "fresh", "home"))
    for name in ("jaxtune", "pallas_kernels"):
        shutil.copytree(ROOT / name, source / name)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    execute(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--wheel-dir", str(wheels), str(source))
    shutil.rmtree(source)
    execute(sys.executable, "-m", "venv", str(fresh))
    (wheel,) = wheels.glob("jaxtune-*.whl")
    execute(str(fresh / "bin" / "pip"), "install", "-q", "--no-compile", str(wheel), "nbclient", "ipykernel")
    write_model_folder(home / "my" / "model")
    write_conversations(home / "chats.jsonl")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        yield fresh / "bin"


def test_the_wheel_is_what_is_imported(bin):
    code = (
        "import jaxtune, pallas_kernels, sys; print(jaxtune.__file__, pallas_kernels.__file__, *sys.path, sep=chr(10))"
    )
    for place in execute(str(bin / "python"), "-c", code).splitlines():
        path = Path(place).resolve()
        assert not path.is_relative_to(ROOT)
        assert not place.endswith("__init__.py") or path.is_relative_to(bin.parent.resolve() / "lib")
    code = (
        "from jaxtune.hf.chat_templates import *; name = 'qwen3_8'; "
        "print(describe_template(find_template(name, dict.fromkeys(NAMED[name], 0)), name))"
    )
    assert "published with Qwen3.8" in execute(str(bin / "python"), "-c", code)
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert execute(str(bin / "jaxtune"), "--version") == f"jaxtune {version}\n"
    assert "torch\n" not in execute(str(bin / "python"), "-m", "pip", "list", "--format=freeze").replace("==", "\n==")


def test_the_quickstart_trains_by_name(bin):
    assert "quickstart " in execute(str(bin / "jaxtune"), "recipes")
    execute(str(bin / "jaxtune"), "train", "--config=quickstart", *SMALL)
    assert metrics(Path("runs/quickstart"))[-1]["step"] == 3
    assert (Path("runs/quickstart/export/model.safetensors")).is_file()


def test_a_copied_recipe_is_ones_own_and_a_plugin_takes_part(bin):
    execute(str(bin / "jaxtune"), "recipes", "--copy=qwen_lora", ".")
    recipe = Path("qwen_lora.py").rename("mine.py")
    recipe.write_text(
        recipe.read_text()
        .replace("lora.rank = 16", "lora.rank = 4")
        .replace('dataset(path="tatsu-lab/alpaca", type="instruction")', 'dataset(path="chats.jsonl")')
        .replace("seq_len = 2048", "seq_len = 64")
    )
    Path("plugin.py").write_text(PLUGIN)
    execute(str(bin / "jaxtune"), "train", "--config=mine.py:my/model", "--plugin=plugin.py", *SMALL)
    run = Path("runs/mine")
    assert json.loads((run / "export" / "adapter_config.json").read_text())["r"] == 4
    losses = [row["loss"] for row in metrics(run) if "loss" in row]
    assert json.loads((run / "mine.txt").read_text()) == losses and len(losses) == 3


def test_a_notebook_trains_asks_and_evaluates_and_shows_progress_in_place(bin):
    cells = [
        {"cell_type": "code", "metadata": {}, "source": source, "outputs": [], "execution_count": None}
        for source in CELLS
    ]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    notebook = {"cells": cells, "metadata": kernel, "nbformat": 4, "nbformat_minor": 4}
    Path("run.ipynb").write_text(json.dumps(notebook))
    execute(str(bin / "jupyter-execute"), "--allow-errors", "--inplace", "run.ipynb")
    first, second, third = (cell["outputs"] for cell in json.loads(Path("run.ipynb").read_text())["cells"])
    (line,) = ("".join(each["data"]["text/plain"]) for each in first if each["output_type"] == "display_data")
    assert line.startswith("6/6  ") and " loss " in line
    printed = "".join("".join(each["text"]) for each in second if each["output_type"] == "stream")
    results = json.loads(next(line for line in printed.splitlines() if line.startswith("{")))
    assert results["equal"] == [True, True] and results["steps"] == [1, 2, 3, 4, 5, 6]
    assert max(map(abs, results["evaluated"])) <= 1e-5, "once from a checkpoint, once from an export"
    saved, exported = results["made"]
    assert saved == exported and [type(text) for text in saved] == [str, str]
    assert results["folder"] == [str(Path("runs/qwen_lora").absolute()), str(Path("runs/qwen_lora/export").absolute())]
    (error,) = (each for each in third if each["output_type"] == "error")
    assert error["ename"] == "UserError" and len(error["traceback"]) == 1
    assert "optim.lr = 0.0001: no such option; nearest: optim.learning_rate" in error["traceback"][0]
