"""The commands of the README, in order, in an empty folder with the wheel installed, and their results.

The trainings are cut to a few steps here; tests/nightly/test_whole_quickstart.py runs them unchanged.
"""

import json
import re

import pytest
from readme import TRAININGS, empty_folder, run_commands, run_python
from runs import call, metrics

from jaxtune import docs


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    with empty_folder(tmp_path_factory) as folder:
        yield folder


@pytest.fixture(scope="module")
def printed(home):
    return run_commands("--config.train.max_steps=5", "--config.eval.max_batches=2")


def test_the_quickstart_learns_and_says_what_to_do_next(home, printed):
    commands = (
        "--config=quickstart_lora",
        *(f"jaxtune.{name}" for name in ("export", "generate", "report")),
        "resume:",
    )
    assert all(shown in printed[TRAININGS[0]] for shown in commands)
    (sample,) = (json.loads(line) for line in (home / "runs/quickstart/samples.jsonl").read_text().splitlines())
    assert (sample["step"], sample["prompt"]) == (5, "def ") and sample["text"].startswith("def ")
    rows = metrics(home / "runs/quickstart")
    trained = [row["loss"] for row in rows if "loss" in row]
    assert abs(trained[0] - 5.5) < 0.2 and trained[-1] < trained[0]
    assert (home / "runs/quickstart/loss.png").stat().st_size > 10_000


def test_adapters_evaluate_as_they_did(home, printed):
    lora = [row["eval_loss"] for row in metrics(home / "runs/quickstart_lora") if "eval_loss" in row]
    evaluated = call("jaxtune.evaluate", "--run=runs/quickstart_lora")
    line_of_loss = next(line for line in evaluated.splitlines() if line.startswith("eval_loss "))
    assert float(line_of_loss.split()[1]) == pytest.approx(lora[-1], abs=1e-5)


def test_every_other_command_of_the_readme_ran(home, printed):
    assert len(printed) == 11
    assert "conversation from messages" in next(text for name, text in printed.items() if "qwen_lora:" in name)
    (prompted,) = (home / "runs").glob("qwen_grpo*/completions.jsonl")
    assert all(set(json.loads(line)) >= {"prompt", "completion", "reward"} for line in prompted.open())


def test_every_metric_is_in_the_reference(home, printed):
    page = docs.read("reference/metrics")
    rows = [
        row for folder in (home / "runs").iterdir() if (folder / "metrics.jsonl").exists() for row in metrics(folder)
    ]
    names = {
        name.removeprefix("eval_").replace("rewards/right/mean", "rewards/NAME/mean") for row in rows for name in row
    }
    assert len(names) > 25
    assert sorted(name for name in names if not re.search(rf"`(eval_)?{name}`", page)) == []


def test_the_python_of_the_readme_runs(home, printed):
    shown = run_python()
    assert f"True {home}/runs/mine " in shown
    assert metrics(home / "runs/mine")[-1]["step"] == 20


def test_the_results_load_in_transformers_and_peft(home, printed):
    greedy = ("--prompt=def ", "--max_new_tokens=40", "--temperature=0")
    text = call("jaxtune.generate", "--model=merged", *greedy)
    assert call("jaxtune.generate", "--model=runs/quickstart_lora", *greedy) == text
    torch = pytest.importorskip("torch", reason="loading the results needs torch (Python 3.11 here)")
    import peft
    import transformers

    prompt = transformers.AutoTokenizer.from_pretrained("merged")("def ", return_tensors="pt")
    base = transformers.AutoModelForCausalLM.from_pretrained("runs/quickstart/export")
    adapted = peft.PeftModel.from_pretrained(base, "adapter").eval()
    merged = transformers.AutoModelForCausalLM.from_pretrained("merged").eval()
    with torch.no_grad():
        difference = (adapted(**prompt).logits - merged(**prompt).logits).abs().max()
    assert difference <= 1e-4
    written = merged.generate(**prompt, max_new_tokens=40, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert transformers.AutoTokenizer.from_pretrained("merged").decode(written) == text.rstrip("\n")
