"""What the README promises first: quickstart, LoRA on its result, export, merge, generate, loaded by others."""

import shutil
from pathlib import Path

import pytest
from runs import metrics, run

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory):
    """A folder with the recipes where the quickstart has run, and what it printed."""
    folder = tmp_path_factory.mktemp("quickstart")
    shutil.copytree(ROOT / "configs", folder / "configs")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "0")  # as a user's
        return folder, run("jaxtune.train", "--config=configs/quickstart.py")


def test_the_commands_of_the_readme_in_a_row(quickstart, monkeypatch):
    tmp_path, output = quickstart
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "0")
    for shown in ("sample: def ", "--config=quickstart_lora", "jaxtune.export", "jaxtune.generate", "resume:"):
        assert shown in output
    rows = metrics(tmp_path / "runs/quickstart")
    assert abs(next(row["loss"] for row in rows if "loss" in row) - 5.5) < 0.2
    assert [row["eval_loss"] for row in rows if "eval_loss" in row][-1] < 2.2
    assert (tmp_path / "runs/quickstart/loss.png").stat().st_size > 10_000

    run("jaxtune.train", "--config=configs/quickstart_lora.py")
    lora = [row["eval_loss"] for row in metrics(tmp_path / "runs/quickstart_lora") if "eval_loss" in row]
    assert lora[-1] < lora[0]
    run("jaxtune.export", "--run=runs/quickstart_lora", "--output=adapter", "--format=peft")
    run("jaxtune.export", "--run=runs/quickstart_lora", "--output=merged", "--merge")
    text = run("jaxtune.generate", "--model=merged", "--prompt=def ", "--max_new_tokens=40", "--temperature=0")
    assert (
        run(
            "jaxtune.generate",
            "--model=runs/quickstart_lora",
            "--prompt=def ",
            "--max_new_tokens=40",
            "--temperature=0",
        )
        == text
    )
    evaluated = run("jaxtune.evaluate", "--config=configs/quickstart_lora.py", "--run=runs/quickstart_lora")
    said = next(line for line in evaluated.splitlines() if line.startswith("eval_loss "))
    assert float(said.split()[1]) == pytest.approx(lora[-1], abs=1e-5)

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
