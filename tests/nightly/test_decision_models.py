"""A decision model: trained, resumed to equal bits, calibrated, exported, and asked."""

import json
import random

import numpy as np
import pytest
from journeys.journey import check_resumed_run
from runs import call, metrics, write_model_folder

TAKES_LONG = True
COVERS = (
    "jaxtune/recipes/qwen_decision.py",
    "jaxtune/objectives/decision.py",
    "jaxtune/data/formats/questions.py",
    "jaxtune/inference/decisions.py",
    "jaxtune/exports/decision_model.py",
    "jaxtune/exports/write.py",
    "jaxtune/exports/peft_targets.py",
    "jaxtune/exports/tokenizer_files.py",
    "jaxtune/weights/class_labels.py",
    "jaxtune/models/head/score.py",
    "jaxtune/training/step.py",
)
SIZES = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32, "max_position_embeddings": 512}
QUESTIONS = {
    "warm": {"type": "noul"},
    "hue": {"type": "choice", "criteria": {"red": None, "blue": None, "grey": None}},
    "size": {"type": "score", "criteria": ["s", "m", "l"]},
}
HEADS = {
    "label tokens": {},
    "linear head, QLoRA": {"model.head": "classification", "quant.format": "nf4", "decision.loss": "rps"},
}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Return a folder with a model and states whose labels, hard or soft, mostly have the same answer."""
    folder, rng = tmp_path_factory.mktemp("home"), random.Random(0)
    write_model_folder(folder / "model", words=("Yes", "No"), **SIZES)
    with (folder / "decisions.jsonl").open("w") as file:
        for _ in range(80):
            labels = {
                "warm": rng.random() < 0.9 or 0.3,
                "hue": rng.choices(["red", {"red": 0.7, "grey": 0.3}, "blue"], [6, 3, 1])[0],
                "size": rng.choices([1, [0.0, 0.5, 0.5]], [8, 2])[0],
            }
            # States differ in their questions.
            asked = rng.sample(list(QUESTIONS), rng.randint(1, 3))
            sample = {"state": rng.choice("abc"), "questions": QUESTIONS, "labels": {n: labels[n] for n in asked}}
            file.write(json.dumps(sample) + "\n")
    return folder


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("head", HEADS)
def test_trains_resumes_exactly_is_calibrated_and_answers(home, head):
    name = head.split()[0]
    options = {
        "data.datasets[0].path": home / "decisions.jsonl",
        "data.datasets[0].type": "decision",
        "data.seq_len": 512,
        "data.validation_split": 0.2,
        "eval.at_start": True,
        "model.dtype": "float32",
        "lora.rank": 4,
        "optim.learning_rate": 3e-2,
        **HEADS[head],
    }
    folder, _ = check_resumed_run(home, "qwen_decision.py", name, **options)
    evaluated = [row for row in metrics(folder) if "eval_loss" in row]
    assert evaluated[-1]["eval_brier"] < 0.8 * evaluated[0]["eval_brier"]
    assert evaluated[-1]["eval_ece"] < evaluated[0]["eval_ece"]
    assert all(row["questions"] > 0 for row in metrics(folder) if "loss" in row)

    exported = home / f"{name}-exported"
    call("jaxtune.export", f"--run={folder}", f"--output={exported}", "--merge")
    described = json.loads((exported / "decision.json").read_text())
    fitted = {kind: evaluated[-1][f"eval_temperature_{kind}"] for kind in ("noul", "choice", "score")}
    assert described["temperature"] == fitted

    (home / "asked.jsonl").write_text(json.dumps({"state": "b", "questions": QUESTIONS, "id": 7}) + "\n")
    call("jaxtune.generate", "--decide", f"--model={folder}", f"--input={home / 'asked.jsonl'}", f"--output={home}/a")
    line = json.loads((home / "a").read_text())
    answers = line["answers"]
    assert line["id"] == 7 and answers.keys() == QUESTIONS.keys() and answers["warm"]["noul"] > 0.5
    if head == "label tokens":
        again = call("jaxtune.generate", "--decide", f"--model={exported}", f"--input={home / 'asked.jsonl'}")
        merged = json.loads(again.splitlines()[-1])["answers"]
        assert abs(merged["warm"]["noul"] - answers["warm"]["noul"]) < 1e-4
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch", reason="loading the results needs torch (Python 3.11 here)")
    pytest.importorskip("transformers.decision", reason="transformers has decision models from 5.24")
    pipeline = transformers.pipeline("decision", model=str(exported), dtype=torch.float32)
    assert (type(pipeline.model).__name__ == "JevForDecision") == ("model.head" in HEADS[head])
    theirs = pipeline({"state": "b", "questions": QUESTIONS})
    within = 1e-3  # merging into a quantized base rounds nothing, but sums in another order
    assert abs(theirs["warm"]["noul"] - answers["warm"]["noul"]) < within
    for question in ("hue", "size"):
        ours, others = (list(each[question]["probabilities"].values()) for each in (answers, theirs))
        assert np.allclose(ours, others, atol=within)
