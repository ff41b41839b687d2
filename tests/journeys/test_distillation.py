"""A small model learns from a larger one, whose likeliest tokens are scored once, before the first step."""

import shutil
from types import SimpleNamespace

import pytest
from journey import check_resumed_run, load_in_transformers
from runs import call, metrics, recipe_command
from tiny import byte_tokenizer, write_model_folder

OPTIONS = {"model.dtype": "float32", "precision.recipe": "fp32", "distill.top_k": 16}


@pytest.fixture(scope="module")
def teacher(home):
    """Train a wider model with the student's tokens and more embeddings on the conversations; return its export."""
    sizes = dict(hidden_size=128, intermediate_size=128, head_dim=32, vocab_size=300)
    write_model_folder(home / "large", **sizes)
    options = {
        "model.path": home / "large",
        "model.dtype": "float32",
        "precision.recipe": "fp32",
        "train.max_steps": 24,
    }
    call(*recipe_command(home, "qwen_full.py", "large", **options))
    return home / "runs" / "large" / "export"


@pytest.mark.nightly
def test_a_student_nears_its_teacher_and_resumes_exactly(home, teacher):
    options = {**OPTIONS, "distill.teacher": teacher}
    folder, output = check_resumed_run(home, "qwen_distill.py", "distilled", **options)
    assert output.count("distill.teacher: scoring") == 1
    first, *_, last = [row for row in metrics(folder) if "loss" in row]
    assert last["divergence"] < first["divergence"] and last["divergence"] == last["loss"]
    assert last["cross_entropy"] < first["cross_entropy"]
    assert all("eval_perplexity" in row for row in metrics(folder) if "eval_loss" in row)
    load_in_transformers(folder / "export")
    # The teacher's scores are cached, also for other losses on the same tokens.
    other_loss = {"distill.divergence": "js", "distill.weight": 0.5, "train.max_steps": 8}
    again = call(*recipe_command(home, "qwen_distill.py", "distilled-js", **options, **other_loss))
    assert "distill.teacher: scoring" not in again
    rows = [row for row in metrics(home / "runs" / "distilled-js") if "loss" in row]
    for row_ in rows:
        assert abs(row_["loss"] / (row_["divergence"] / 2 + row_["cross_entropy"] / 2) - 1) <= 1e-5
    assert "most likely tokens of a teacher" in call("jaxtune.cache", f"--folder={home / 'runs' / 'cache'}")


@pytest.mark.nightly
def test_adapters_of_a_student_learn_from_a_teacher_with_adapters(home):
    """The teacher is an adapter's folder, which names its base."""
    lora = {"lora.enabled": True, "lora.rank": 4, "model.dtype": "float32", "precision.recipe": "fp32"}
    call(*recipe_command(home, "qwen_lora.py", "adapter", **{**lora, "train.max_steps": 24}))
    options = {**OPTIONS, **lora, "distill.teacher": home / "runs" / "adapter" / "export"}
    folder, _ = check_resumed_run(home, "qwen_distill.py", "distilled-adapters", **options)
    first, *_, last = [row for row in metrics(folder) if "loss" in row]
    assert last["divergence"] < first["divergence"] / 2


def test_a_teacher_of_other_tokens_is_refused(home, teacher):
    larger = home / "other"
    shutil.copytree(teacher, larger)
    byte_tokenizer(larger, special=("<|endoftext|>", "<|im_end|>", "<|im_start|>"))
    command = recipe_command(home, "qwen_distill.py", "refused", **OPTIONS, **{"distill.teacher": larger})
    output = call(*command, code=2)
    assert f"distill.teacher='{larger}' has another tokenizer than model.path='{home / 'model'}': 2 of" in output
    assert "'<|im_start|>', which is token 257 and token 258 of the teacher" in output


REFUSED = {
    "a stream": ({"data.streaming": True, "data.validation_split": 0}, "which data.streaming cannot provide"),
    "more tokens than there are": ({"distill.top_k": 1000}, "distill.top_k=1000: there are 259 tokens"),
    "no such folder": ({"distill.teacher": "/no/such/folder"}, "distill.teacher='/no/such/folder': "),
    "a mixture of losses": ({"preference.loss": "sigmoid"}, "distill.teacher"),
}


@pytest.mark.parametrize(("options", "said"), REFUSED.values(), ids=REFUSED)
def test_is_refused_by_name(home, teacher, options, said):
    command = recipe_command(home, "qwen_distill.py", "refused", **{**OPTIONS, "distill.teacher": teacher, **options})
    assert said in call(*command, code=2)


def test_a_disk_without_room_is_told_before_anything_is_scored(home, teacher, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
    options = {**OPTIONS, "distill.teacher": teacher, "distill.temperature": 3.0}
    output = call(*recipe_command(home, "qwen_distill.py", "no-room", **options), code=2)
    assert "distill.top_k=16 likeliest tokens for" in output and "which has 1.0 kB free" in output
    assert "distill.teacher: scoring" not in output
