"""A model with a multi-token-prediction module: trained with it, resumed, evaluated, exported, loaded."""

import pytest
from journey import check_resumed_run, load_in_transformers
from runs import metrics, write_conversations
from safetensors.numpy import load_file
from tiny import write_model_folder

SIZES = dict(hidden_size=64, head_dim=16, layer_types=["full_attention"] * 2, mtp_num_hidden_layers=1)


@pytest.mark.nightly
def test_trains_resumes_exactly_and_exports(tmp_path):
    base = write_model_folder(tmp_path / "model", "Qwen3_5Text", mtp=True, **SIZES)
    write_conversations(tmp_path / "chat.jsonl")
    folder, output = check_resumed_run(
        tmp_path, "qwen_full.py", "mtp", **{"mtp.weight": 0.3, "train.grad_accum_steps": 1, "optim.learning_rate": 1e-3}
    )
    rows = metrics(folder)
    steps = [row for row in rows if "mtp_loss" in row]
    assert steps[-1]["mtp_loss"] < steps[0]["mtp_loss"] and steps[-1]["mtp_accuracy/1"] > 0
    evaluated = next(row for row in rows if "eval_loss" in row)
    assert evaluated["eval_mtp_loss"] > 0 and 0 <= evaluated["eval_mtp_accuracy/1"] <= 1
    before, after = (load_file(path / "model.safetensors") for path in (base, folder / "export"))
    assert before.keys() == after.keys() and "1 module for further tokens" in output and "will lack" not in output
    assert all((before[name] != after[name]).any() for name in before if name.startswith("mtp."))
    load_in_transformers(folder / "export")
