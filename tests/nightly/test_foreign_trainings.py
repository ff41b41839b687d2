"""Whole files of other systems train at tiny size; only paths and sizes differ from tests/golden/foreign_files."""

import json
from pathlib import Path

import jax
import pytest
from runs import call, metrics, write_answers, write_conversations, write_model_folder

COVERS = ("jaxtune", "tests/golden/foreign_files")
FILES = Path(__file__).parents[1] / "golden" / "foreign_files"
SIZES = dict(
    hidden_size=64,
    intermediate_size=128,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=512,
)
EXPERTS = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, decoder_sparse_step=1)
# file: (devices, the model's class, options other than paths and sizes)
TRAINED: dict[str, tuple[int, str, dict[str, object]]] = {
    "xorl/full_made_up": (8, "Qwen3", {"data.datasets[0].max_tokens": 64, "data.datasets[0].dummy_length": 64}),
    "xorl/muon_and_experts": (8, "Qwen3Moe", {"data.datasets[0].dummy_length": 64}),
    "surogate/adapters": (1, "Qwen3", {"data.datasets[0].max_tokens": 24, "ckpt.resume": "auto"}),
    "surogate/preferences": (1, "Qwen3", {"data.seq_len": 256}),
    "surogate/streamed_from_the_host": (2, "Qwen3", {"data.seq_len": 256}),
}


@pytest.fixture(autouse=True)
def compiled_quickly_in_its_folder(tmp_path, monkeypatch):
    """Compile without optimisations, in a folder of its own: some systems write next to the config."""
    monkeypatch.chdir(tmp_path)
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.mark.parametrize("file", TRAINED)
def test_a_whole_file_trains(file, tmp_path):
    devices, kind, more = TRAINED[file]
    write_model_folder(tmp_path / "model", kind, **SIZES, **(EXPERTS if kind == "Qwen3Moe" else {}))
    options: dict[str, object] = {
        "model.path": tmp_path / "model",
        "data.seq_len": 64,
        "data.cache_dir": tmp_path / "cache",
        "train.max_steps": 3,
        "train.output_dir": tmp_path / "runs",
    }
    options |= {f"data.{name}.path": path for name, path in _data(file, tmp_path).items()}
    settings = [f"--config.{key}={value}" for key, value in (options | more).items()]
    printed = call("jaxtune.train", FILES / f"{file}.yaml", *settings, devices=devices)
    (file_of_metrics,) = (tmp_path / "runs").glob("*/metrics.jsonl")
    assert [row["loss"] for row in metrics(file_of_metrics.parent) if "loss" in row], printed


def _data(file: str, folder: Path) -> dict[str, Path]:
    """Write data in the form that a file reads."""
    if file == "surogate/preferences":
        return {"datasets[0]": write_answers(folder / "pairs.jsonl")}
    if file == "surogate/adapters":
        messages = [json.loads(row)["messages"] for row in write_conversations(folder / "chat.jsonl").open()]
        turns = [[{"from": turn["role"], "value": turn["content"]} for turn in turns] for turns in messages]
        (folder / "chat.jsonl").write_text("".join(json.dumps({"conversations": row}) + "\n" for row in turns))
        return {"datasets[0]": folder / "chat.jsonl"}
    if file == "surogate/streamed_from_the_host":
        for name, column in (("text", "text"), ("held_out", "body")):
            (folder / f"{name}.jsonl").write_text(json.dumps({column: "the quick brown fox " * 8}) + "\n")
            row = (folder / f"{name}.jsonl").read_text()
            (folder / f"{name}.jsonl").write_text(row * 60)
        return {"datasets[0]": folder / "text.jsonl", "eval_datasets[0]": folder / "held_out.jsonl"}
    return {}
