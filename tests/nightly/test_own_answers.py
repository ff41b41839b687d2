"""On-policy distillation: a student answers prompts, and its teacher scores the answers in each step."""

import json
import shutil

import pytest
from journeys.journey import load_in_transformers
from runs import call, metrics, recipe_command, write_conversations
from tiny import write_model_folder

COVERS = (
    "jaxtune/data/formats/answer_reader.py",
    "jaxtune/data/rows/prompt_feed.py",
    "jaxtune/objectives/distillation.py",
    "jaxtune/recipes/qwen_opd.py",
    "jaxtune/rollout/completion_rows.py",
    "jaxtune/rollout/own_answers.py",
    "jaxtune/rollout/teacher_server.py",
    "jaxtune/scoring/kept_teacher.py",
)
OPTIONS = {
    "model.dtype": "float32",
    "precision.recipe": "fp32",
    "chat.template": "chatml",
    "data.datasets[0].type": "auto",
    "data.datasets[0].subset": None,
    "data.seq_len": 64,
    "data.validation_split": 4,
    "rollout.max_new_tokens": 6,
    "distill.top_k": 16,
    "train.micro_batch_size": 4,
    "ckpt.save_steps": 6,
    "eval.steps": 4,
    "eval.at_start": True,
}
KEPT = ("loss", "divergence", "grad_norm", "completions/mean_length", "eval_divergence")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Return a folder with a student, a wider teacher that has learned some answers, and prompts with hints."""
    folder = tmp_path_factory.mktemp("home")
    write_conversations(folder / "chat.jsonl")
    write_model_folder(folder / "model", hidden_size=64, intermediate_size=128, head_dim=32)
    write_model_folder(folder / "untrained", hidden_size=128, intermediate_size=128, head_dim=32, vocab_size=300)
    options = {"model.path": folder / "untrained", "model.dtype": "float32", "precision.recipe": "fp32"}
    call(*recipe_command(folder, "qwen_full.py", "teacher", **options, **{"train.max_steps": 24}))
    rows = [{"prompt": f"say {i}", "hint": "red"} for i in range(30)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def command(home, name, **options):
    options = {
        "data.datasets[0].path": home / "prompts.jsonl",
        "distill.teacher": home / "runs" / "teacher" / "export",
        **options,
    }
    return recipe_command(home, "qwen_opd.py", name, **OPTIONS | options)


def resume(home, name, arguments):
    """Train, resume from the checkpoint before the last, expect equal bits; return (metrics, printed)."""
    run = home / "runs" / name
    printed = call(*arguments)
    whole, written = metrics(run), (run / "completions.jsonl").read_text()
    shutil.rmtree(run / "checkpoints" / "8")
    shutil.rmtree(run / "export")
    assert "resumed from step 6" in call(*arguments)
    assert [[row.get(key) for key in KEPT] for row in metrics(run)] == [[row.get(key) for key in KEPT] for row in whole]
    assert (run / "completions.jsonl").read_text() == written
    return whole, printed


def test_a_student_nears_its_teacher_and_resumes_exactly(home):
    run, arguments = home / "runs" / "whole", command(home, "whole")
    rows, printed = resume(home, "whole", arguments)
    assert "teacher" in next(line for line in printed.splitlines() if "state and batch:" in line)
    evals = [row for row in rows if "eval_divergence" in row]
    assert [row["step"] for row in evals] == [0, 4, 8]
    last = evals[-1]["eval_divergence"]
    assert last < evals[0]["eval_divergence"] / 2 and last == evals[-1]["eval_loss"]
    assert f"eval_divergence {last:.6f}" in call("jaxtune.evaluate", f"--run={run}", *arguments[1:])
    lines = [json.loads(line) for line in (run / "completions.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [*range(1, 9)] and lines[0]["prompt"].startswith("say ")
    load_in_transformers(run / "export")


def test_some_steps_learn_from_the_answers_in_the_data(home):
    options = {"distill.own_answers": 0.5, "data.datasets[0].path": home / "chat.jsonl"}
    rows, _ = resume(home, "mixed", command(home, "mixed", **options))
    own = ["completions/mean_length" in row for row in rows if "loss" in row]
    assert {*own} == {True, False} and len(own) == 8


def test_each_prompt_has_the_teacher_that_its_column_names(home):
    rows = [{"prompt": f"say {i}", "teacher": ("good", "same")[i % 2]} for i in range(30)]
    (home / "named.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    teachers = f"good={home / 'runs' / 'teacher' / 'export'},same={home / 'model'}"
    options = {"distill.teacher": teachers, "data.datasets[0].path": home / "named.jsonl", "distill.top_k": 8}
    rows, _ = resume(home, "several", command(home, "several", **options))
    evals = [row["eval_divergence"] for row in rows if "eval_divergence" in row]
    assert 0 < evals[-1] < evals[0]


def test_adapters_learn_from_their_base_that_sees_a_hint(home):
    """The hint is all that the base sees, as it is: the adapters learn to answer another prompt."""
    options = {"model.path": home / "runs" / "teacher" / "export", "lora.enabled": True, "lora.rank": 4}
    options |= {"distill.teacher": "base", "data.datasets[0].teacher_prompt_field": "hint"}
    options |= {"optim.learning_rate": 1e-3}
    rows, _ = resume(home, "base", command(home, "base", **options))
    evals = [row["eval_divergence"] for row in rows if "eval_divergence" in row]
    assert 0 < evals[-1] < evals[0] / 2
