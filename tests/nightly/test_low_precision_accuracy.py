"""Low precision trains almost as well as bfloat16: the rows of the documentation, measured again."""

import re
import shutil
from pathlib import Path

import pytest
from runs import metrics, run

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "explanations" / "predicted_and_measured.md"
TAKES_LONG = True
COVERS = (
    "jaxtune/lora",
    "jaxtune/models",
    "jaxtune/objectives",
    "jaxtune/precision",
    "jaxtune/recipes/quickstart.py",
    "jaxtune/recipes/quickstart_lora.py",
    "jaxtune/training/step.py",
)
STEPS, LAST, SEEDS = 200, 50, 3
# Upper limits of the loss, relative to bfloat16.
WORSE = {"fp8_hybrid": 1.01, "nvfp4": 1.04}


@pytest.mark.timeout(2400)  # ten trainings
def test_low_precision_trains_almost_as_well_as_bfloat16(tmp_path, monkeypatch):
    """LoRA on the quickstart's model: mean loss of the last 50 of 200 steps over 3 seeds, printed and documented."""
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "0")
    run("jaxtune.train", "--config=configs/quickstart.py")

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
            rows = [row["loss"] for row in metrics(tmp_path / "runs" / name) if "loss" in row]
            assert len(rows) == STEPS
            found.append(sum(rows[-LAST:]) / LAST)
        return sum(found) / SEEDS

    expected = mean_loss("bf16")
    print(f"against {expected:.4f} in bfloat16")
    for recipe, worse in WORSE.items():
        loss = mean_loss(recipe)
        print(f"| `{recipe}` | {loss:.4f} | {loss / expected - 1:+.2%} |")
        assert loss <= worse * expected
        row = re.search(rf"\| `{recipe}` \| ([\d.]+) \| ([+-][\d.]+)% \|", PAGE.read_text())
        assert row, f"the page has no row of {recipe}"
        assert abs(float(row[2]) / 100 - (loss / expected - 1)) <= 0.005
