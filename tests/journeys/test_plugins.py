"""The files of docs/guides/plugins.md, unchanged, all in one run, which resumes with the state that they saved."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from runs import call, losses, metrics
from tiny import write_model_folder

from jaxtune.models import families

PAGE = (Path(__file__).parents[2] / "docs" / "guides" / "plugins.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE, re.DOTALL))


@pytest.fixture
def home(tmp_path, monkeypatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        Path(name).write_text(text)
    folder = write_model_folder(tmp_path / "model", architectures=["LlamaForCausalLM"])
    described = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(described | {"model_type": "smol"}))
    rows = [{"question": f"say {i}", "reply": "red green blue"[: i % 14]} for i in range(60)]
    Path("mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with mock.patch.dict(families.FAMILIES):
        yield tmp_path


def test_all_of_them_take_part_and_come_back(home):
    assert set(FILES) == {"my_callbacks.py", "focal.py", "signs.py", "my_family.py", "my_data.py"}
    options = {
        "data.datasets[0].path": "mine.jsonl",
        "data.datasets[0].type": "conversation",
        "data.datasets[0].function": "my_data.py:to_messages",
        "data.validation_split": 0.2,
        "data.seq_len": 32,
        "train.max_steps": 8,
        "train.run_name": "mine",
        "ckpt.save_steps": 4,
        "eval.steps": 4,
        "optim.learning_rate": 1e-3,
        "precision.recipe": "fp32",
        "memory.remat": "none",
    }
    command = ["jaxtune.train", "--config=qwen_full:model", *(f"--config.{key}={x}" for key, x in options.items())]
    command += [f"--plugin={name}" for name in FILES if name != "my_data.py"]
    call(*command)
    folder = home / "runs" / "mine"
    whole, rows = losses(folder), [row for row in metrics(folder) if "loss" in row]
    assert rows[-1]["certainty"] > rows[0]["certainty"] > 0, "the objective's own metric rises"
    first = -np.log(rows[0]["certainty"])
    assert rows[0]["loss"] < first, "focal loss is below the cross-entropy"
    assert (folder / "evaluations.txt").read_text().split()[::2] == ["4", "8"]
    checkpoint = json.loads((folder / "checkpoints" / "8" / "host.json").read_text())
    assert checkpoint["host"]["plugins"]["my_callbacks.py"] == {"lowest": min(row["loss"] for row in rows)}

    shutil.rmtree(folder / "checkpoints" / "8")
    shutil.rmtree(folder / "export")
    assert "resumed from step 4" in call(*command)
    assert losses(folder) == whole
    again = json.loads((folder / "checkpoints" / "8" / "host.json").read_text())
    assert again["host"]["plugins"] == checkpoint["host"]["plugins"]
    assert "eval_loss" in call("jaxtune.evaluate", f"--run={folder}", f"--config={folder}/config.json")


def test_a_plugin_may_end_the_run(home):
    Path("ends.py").write_text("def on_step(run, step, metrics):\n    if step == 3:\n        run.end('three')\n")
    options = ["train.max_steps=9", "precision.recipe=fp32", "data.datasets[0].path=mine.jsonl", "data.seq_len=32"]
    options += [
        "data.datasets[0].type=conversation",
        "data.datasets[0].function=my_data.py:to_messages",
        "train.run_name=short",
    ]
    command = ["jaxtune.train", "--config=qwen_full:model", "--plugin=my_family.py", "--plugin=ends.py"]
    command += [f"--config.{option}" for option in options]
    # Step 3's metrics are known while step 4 runs.
    assert "ended at step 4 of 9: three" in call(*command)
    assert "this run is finished: 4 of 9 steps" in call(*command)
    assert (home / "runs" / "short" / "export" / "model.safetensors").exists()
