"""Configs of other systems train, with the bits that the recipes of `jaxtune convert` have."""

import json
import shutil
from pathlib import Path

import jax
import pytest
from foreign_runs import flags
from nightly_rows import nightly_except
from runs import call, losses, metrics

EXAMPLES = Path(__file__).parents[1] / "golden" / "foreign"
# The sizes of the other journeys, with longer rows and as many layers as stages.
SIZES = dict(
    hidden_size=64,
    intermediate_size=128,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=512,
    num_hidden_layers=4,
)
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
    """Compile without optimisations, as `runs.start` does, in `home`: some systems write next to the config."""
    monkeypatch.chdir(home)
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.mark.nightly
def test_surogates_example_and_the_same_recipe_have_bit_equal_losses(home):
    """One recipe is written by hand here, the other is a conversion."""
    data = home / "finetome.jsonl"
    rows = [json.loads(line)["messages"] for line in (home / "chat.jsonl").read_text().splitlines()]
    data.write_text("".join(json.dumps({"conversations": messages}) + "\n" for messages in rows))
    fields = {"model": str(home / "model"), "data": str(data), "output": str(home / "runs")}
    (home / "same.py").write_text(RECIPE.format(**fields))
    sizes = ["--config.data.seq_len=64", "--config.train.max_steps=4", f"--config.train.output_dir={home / 'runs'}"]
    paths = [f"--config.model.path={home / 'model'}", f"--config.data.datasets[0].path={data}"]
    printed = train_file_and_conversion(home, "surogate", [*paths, *sizes])
    call("jaxtune.train", f"--config={home / 'same.py'}")
    assert losses(home / "runs" / "surogate") == losses(home / "runs" / "same")
    assert len(losses(home / "runs" / "surogate")) >= 4
    assert "lora_dropout = 0.05 -> lora.dropout = 0.05" in printed


def train_file_and_conversion(home: Path, system: str, settings: list[str], devices: int = 1) -> str:
    """Train a system's example and its conversion, compare their losses, and return what the first printed."""
    file, recipe = EXAMPLES / f"{system}.yaml", home / f"{system}_converted.py"
    printed = call("jaxtune.train", file, *settings, devices=devices)
    call("jaxtune.convert", file, f"--output={recipe}", *settings)
    call("jaxtune.train", f"--config={recipe}", devices=devices)
    assert losses(home / "runs" / recipe.stem) == losses(home / "runs" / system)
    return printed


ALPACA = {"instruction": "say it", "input": "", "output": "red"}
CHAT = {"messages": [{"role": "user", "content": "say it"}, {"role": "assistant", "content": "red"}]}
SHAREGPT = [{"from": "human", "value": "say it"}, {"from": "gpt", "value": "red"}]
# system, rows of its data, the lists of data, devices its config needs
OTHERS = {
    "axolotl": (ALPACA | {"conversations": SHAREGPT}, ["datasets[0]", "datasets[1]"], 1),
    "xorl": ({"input_ids": [5, 6, 7, 8], "labels": [5, 6, 7, 8]}, ["datasets[0]"], 4),
    "erniekit": ({"src": ["say it"], "tgt": ["red"]}, ["datasets[0]", "datasets[1]", "eval_datasets[0]"], 8),
    "qefficient": ({"dialogue": "say it", "summary": "red"}, ["datasets[0]", "eval_datasets[0]"], 1),
    "trl": (CHAT, ["datasets[0]", "eval_datasets[0]"], 1),
}


@pytest.mark.parametrize("system", OTHERS)
@pytest.mark.nightly
def test_examples_of_other_systems_train(home, system):
    """So do their conversions, with bit-equal losses.

    Only paths and sizes differ from the example: XORL's has four pipeline stages, ERNIEKit's eight shards. The tiny
    model lacks the chat template of the model in Axolotl's.
    """
    row, lists, devices = OTHERS[system]
    data = home / f"{system}.jsonl"
    data.write_text(f"{json.dumps(row)}\n" * 40 * devices)
    options = sizes(home, seq_len=256 if system == "axolotl" else 64) | {f"data.{name}.path": data for name in lists}
    warmup: dict[str, object] = {"optim.warmup_steps": 1}
    options |= {
        "erniekit": warmup,
        "axolotl": warmup | {"chat.template": "chatml"},
        "xorl": {"train.grad_accum_steps": 4},
    }.get(system, {})
    train_file_and_conversion(home, system, flags(options), devices)
    assert [row["step"] for row in metrics(home / "runs" / system) if "loss" in row][-1] == 3


def sizes(home: Path, seq_len: int) -> dict[str, object]:
    """Return options for paths and sizes."""
    return {
        "model.path": home / "model",
        "data.seq_len": seq_len,
        "train.max_steps": 3,
        "train.grad_accum_steps": 1,
        "train.output_dir": home / "runs",
    }


# The file of an example, and a row of each of its datasets.
DATA = {
    "surogate_adapters": [{"text": "the quick brown fox"}, ALPACA, CHAT],
    "surogate_pretraining": [{"text": "the quick brown fox"}],
    "qefficient_alpaca": [ALPACA, ALPACA | {"input": "and more"}],
    "qefficient_gsm8k": [{"question": "1 + 1?", "answer": "2"}, {"question": "1 + 2?", "answer": "3"}],
    "qefficient_grammar": [{"input": "i is", "target": "I am"}],
}


@pytest.mark.parametrize("example", nightly_except(["surogate_adapters"], DATA))
def test_examples_of_data_train(home, example):
    """Only paths and sizes differ. QEfficient's validation data are the split of that name, in a list of their own."""
    lists = ["datasets[0]", "eval_datasets[0]"] if example in ("qefficient_alpaca", "qefficient_gsm8k") else []
    lists = lists or [f"datasets[{i}]" for i in range(len(DATA[example]))]
    options = sizes(home, seq_len=64 if "surogate" in example else 256)
    for name, row in zip(lists, DATA[example]):
        file = home / f"{example}_{name[:-3]}{name[-2]}.jsonl"
        file.write_text(f"{json.dumps(row)}\n" * 40)
        options[f"data.{name}.path"] = file
    shutil.copytree(EXAMPLES / "data", home / "preprocess", dirs_exist_ok=True)
    file = EXAMPLES / "data" / f"{example}.yaml"
    printed = call("jaxtune.train", file, *flags(options))
    rows = metrics(home / "runs" / example)
    assert [row["step"] for row in rows if "loss" in row] and "eval_loss" in rows[-1], printed
