"""Configs of other systems train, and one of them as the recipe that says the same, to the last bit."""

import json
from pathlib import Path

import jax
import pytest
from runs import call, losses, metrics

EXAMPLES = Path(__file__).parents[1] / "golden" / "foreign"
RECIPE = """
from jaxtune.config import dataset, new_config

def get_config():
    config = new_config()
    config.model.path = {model!r}
    config.data.datasets = (dataset(path={data!r}, type="conversation", messages_field="conversations"),)
    config.data.validation_split = 0.1
    config.chat.template = "chatml"
    config.data.truncation = "delete"
    config.data.seq_len = 64
    config.train.micro_batch_size = 2
    config.train.grad_accum_steps = 4
    config.train.max_steps = 4
    config.train.output_dir = {output!r}
    config.optim.name = "adamw_8bit"
    config.optim.learning_rate = 2e-4
    config.optim.schedule = "cosine"
    config.optim.warmup_ratio = 0.03
    config.optim.weight_decay = 0.1
    config.lora.enabled = True
    config.lora.rank = 16
    config.lora.alpha = 32.0
    config.lora.dropout = 0.05
    config.parallel.zero = 1
    config.device.gpus = 1
    config.memory.remat = "block"
    config.eval.steps = 100
    return config
"""


@pytest.fixture(autouse=True)
def compiled_quickly_in_its_folder(home, monkeypatch):
    """Not for speed, as in processes of `runs.start`; and some of these systems write beside the config."""
    monkeypatch.chdir(home)
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def test_surogates_example_and_the_same_recipe_have_bit_equal_losses(home):
    data = home / "finetome.jsonl"
    rows = [json.loads(line)["messages"] for line in (home / "chat.jsonl").read_text().splitlines()]
    data.write_text("".join(json.dumps({"conversations": messages}) + "\n" for messages in rows))
    fields = {"model": str(home / "model"), "data": str(data), "output": str(home / "runs")}
    (home / "same.py").write_text(RECIPE.format(**fields))
    sizes = ["--config.data.seq_len=64", "--config.train.max_steps=4", f"--config.train.output_dir={home / 'runs'}"]
    paths = [f"--config.model.path={home / 'model'}", f"--config.data.datasets[0].path={data}"]
    printed = call("jaxtune.train", EXAMPLES / "surogate.yaml", *paths, *sizes)
    call("jaxtune.train", f"--config={home / 'same.py'}")
    assert losses(home / "runs" / "surogate") == losses(home / "runs" / "same")
    assert len(losses(home / "runs" / "surogate")) >= 4
    assert "lora_dropout = 0.05 -> lora.dropout = 0.05" in printed


# system, rows of its data, the lists of data, options for one CPU besides
OTHERS = {
    "xorl": ({"input_ids": [5, 6, 7, 8], "labels": [5, 6, 7, 8]}, ["datasets[0]"], {"mesh.stage": 1}),
    "erniekit": (
        {"src": ["say it"], "tgt": ["red"]},
        ["datasets[0]", "datasets[1]", "eval_datasets[0]"],
        {"mesh.fsdp": 1, "optim.warmup_steps": 1},
    ),
    "qefficient": ({"dialogue": "say it", "summary": "red"}, ["datasets[0]", "eval_datasets[0]"], {}),
}


@pytest.mark.parametrize("system", OTHERS)
def test_examples_of_other_systems_train(home, system):
    row, lists, others = OTHERS[system]
    data = home / f"{system}.jsonl"
    data.write_text(f"{json.dumps(row)}\n" * 40)
    options = {
        "model.path": home / "model",
        "data.seq_len": 64,
        "train.max_steps": 2,
        "train.output_dir": home / "runs",
    }
    options |= {f"data.{name}.path": data for name in lists} | others
    call("jaxtune.train", EXAMPLES / f"{system}.yaml", *[f"--config.{key}={value}" for key, value in options.items()])
    assert [row["step"] for row in metrics(home / "runs" / system) if "loss" in row]
