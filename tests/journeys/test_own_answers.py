"""On-policy distillation: a student answers prompts, and a larger model scores its answers in each step."""

import json
import shutil

import pytest
from journey import load_in_transformers
from runs import call, metrics, recipe_command
from tiny import write_model_folder

OPTIONS = {
    "model.dtype": "float32",
    "precision.recipe": "fp32",
    "chat.template": "chatml",
    "data.datasets[0].type": "auto",
    "data.datasets[0].subset": None,
    "data.seq_len": 32,
    "data.validation_split": 4,
    "rollout.max_new_tokens": 6,
    "distill.top_k": 16,
    "train.micro_batch_size": 4,
    "ckpt.save_steps": 6,
    "eval.steps": 4,
    "eval.at_start": True,
}


@pytest.fixture(scope="module")
def options(home):
    """Write prompts and a wider teacher with the student's tokens; return the options of a run."""
    write_model_folder(home / "large", hidden_size=128, intermediate_size=128, head_dim=32, vocab_size=300)
    rows = [{"prompt": f"say {i}"} for i in range(30)]
    (home / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return OPTIONS | {"data.datasets[0].path": home / "prompts.jsonl", "distill.teacher": home / "large"}


def test_a_student_nears_its_teacher_and_resumes_exactly(home, options):
    command = recipe_command(home, "qwen_opd.py", "opd", **options)
    run = home / "runs" / "opd"
    output = call(*command)
    assert "teacher" in next(line for line in output.splitlines() if "state and batch:" in line)
    whole, written = metrics(run), (run / "completions.jsonl").read_text()
    shutil.rmtree(run / "checkpoints" / "8")
    shutil.rmtree(run / "export")
    assert "resumed from step 6" in call(*command)
    kept = ("loss", "divergence", "grad_norm", "completions/mean_length", "eval_divergence")
    assert [[row.get(key) for key in kept] for row in metrics(run)] == [[row.get(key) for key in kept] for row in whole]
    assert (run / "completions.jsonl").read_text() == written
    evals = [row for row in whole if "eval_divergence" in row]
    assert [row["step"] for row in evals] == [0, 4, 8]
    assert evals[-1]["eval_divergence"] < evals[0]["eval_divergence"] / 2
    last = evals[-1]["eval_divergence"]
    assert last == evals[-1]["eval_loss"]
    assert f"eval_divergence {last:.6f}" in call("jaxtune.evaluate", f"--run={run}", *command[1:])
    lines = [json.loads(line) for line in written.splitlines()]
    assert [line["step"] for line in lines] == [*range(1, 9)] and lines[0]["prompt"].startswith("say ")
    load_in_transformers(run / "export")
