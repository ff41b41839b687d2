"""What the README promises first: quickstart, LoRA on its result, export, merge, generate, loaded by others."""

import re
import shutil
from pathlib import Path

import pytest
from runs import metrics, run

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory):
    """A folder with the recipes where the quickstart has run, and what it printed."""
    folder = tmp_path_factory.mktemp("quickstart")
    shutil.copytree(ROOT / "configs", folder / "configs")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return folder, run("jaxtune.train", "--config=configs/quickstart.py")


@pytest.mark.slow
def test_the_commands_of_the_readme_in_a_row(quickstart, monkeypatch):
    tmp_path, output = quickstart
    monkeypatch.chdir(tmp_path)
    for shown in ("sample: def ", "configs/quickstart_lora.py", "jaxtune.export", "jaxtune.generate", "resume:"):
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


STEPS, LAST, SEEDS = 200, 50, 3
# Of the loss in bfloat16, at most.
WORSE = {"fp8_hybrid": 1.01, "nvfp4": 1.04}


@pytest.mark.slow
def test_low_precision_trains_almost_as_well_as_bfloat16(quickstart, monkeypatch):
    """LoRA on the quickstart's model: mean loss of the last 50 of 200 steps over 3 seeds, printed and in the README."""
    monkeypatch.chdir(quickstart[0])

    def mean_loss(recipe: str) -> float:
        found = []
        for seed in range(SEEDS):
            name = f"{recipe}-{seed}"
            run(
                "jaxtune.train",
                "--config=configs/quickstart_lora.py",
                f"--config.precision.recipe={recipe}",
                f"--config.train.run_name={name}",
                f"--config.train.seed={seed}",
                f"--config.data.seed={seed}",
                f"--config.train.max_steps={STEPS}",
                "--config.train.micro_batch_size=1",
                "--config.data.validation_split=0.0",
                "--config.eval.steps=0",
                "--config.eval.max_batches=None",
                "--config.eval.sample_prompt=None",
                "--config.export.at_end=False",
                "--config.ckpt.save_steps=0",
            )
            rows = [row["loss"] for row in metrics(quickstart[0] / "runs" / name) if "loss" in row]
            assert len(rows) == STEPS
            found.append(sum(rows[-LAST:]) / LAST)
        return sum(found) / SEEDS

    expected = mean_loss("bf16")
    print(f"against {expected:.4f} in bfloat16")
    for recipe, worse in WORSE.items():
        loss = mean_loss(recipe)
        print(f"| `{recipe}` | {loss:.4f} | {loss / expected - 1:+.2%} |")
        assert loss <= worse * expected
        row = re.search(rf"\| `{recipe}` \| ([\d.]+) \| ([+-][\d.]+)% \|", (ROOT / "README.md").read_text())
        assert row, f"the README has no row of {recipe}"
        assert abs(float(row[2]) / 100 - (loss / expected - 1)) <= 0.005
