"""A user's work with a recipe: train, be interrupted, resume, evaluate, export, load elsewhere.

`check_killed_run` trains in a process that is killed by SIGKILL, and resumes in this one. For other recipes
`check_resumed_run` calls the same commands in this process and interrupts the run by removing its newest checkpoint.
"""

import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
from runs import call, losses, metrics, recipe_command, start, wait_for_step

STEPS, KILLED_AT, SAVED = 8, 5, 6


def check_killed_run(home: Path, recipe: str, **options) -> Path:
    """Kill and resume a run, compare its numbers with an uninterrupted run in this process, and return its folder."""
    stem = recipe.removesuffix(".py")
    call(*recipe_command(home, recipe, f"{stem}-whole", **options))
    command = recipe_command(home, recipe, f"{stem}-killed", **options)
    folder = home / "runs" / f"{stem}-killed"
    process = start(*command)
    wait_for_step(process, folder, KILLED_AT)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert "resumed from step" in call(*command)
    assert losses(folder) == losses(home / "runs" / f"{stem}-whole")
    trained = [row["loss"] for row in metrics(folder) if "loss" in row]
    assert len(trained) == STEPS and trained[-1] < trained[0]
    check_last_eval_loss(command, folder)
    return folder


def check_resumed_run(home: Path, recipe: str, name: str, **options) -> tuple[Path, str]:
    """Train in this process, resume from the checkpoint before the last, expect equal bits; return (folder, output)."""
    command = recipe_command(home, recipe, name, **{"ckpt.save_steps": SAVED, **options})
    folder = home / "runs" / name
    output = call(*command)
    whole = losses(folder)
    shutil.rmtree(folder / "checkpoints" / str(STEPS))
    shutil.rmtree(folder / "export")
    assert f"resumed from step {SAVED}" in call(*command)
    assert losses(folder) == whole
    trained = [row["loss"] for row in metrics(folder) if "loss" in row]
    assert len(trained) == STEPS and trained[-1] < trained[0]
    check_last_eval_loss(command, folder)
    return folder, output


def check_last_eval_loss(command: list[str], folder: Path) -> None:
    """Check that `evaluate` finds the eval_loss that training ended with."""
    expected = [row["eval_loss"] for row in metrics(folder) if "eval_loss" in row][-1]
    evaluated = call("jaxtune.evaluate", f"--run={folder}", *command[1:])
    assert abs(float(evaluated.split("eval_loss ")[1].split()[0]) - expected) <= 1e-5


def load_in_transformers(exported: Path, base: Path | None = None, adapter: Path | None = None, within: float = 0.0):
    """Load a model in transformers; its logits are finite and equal peft's to `within` times the largest."""
    torch = pytest.importorskip("torch", reason="loading the results needs torch (Python 3.11 here)")
    import peft
    import transformers

    def logits(model) -> np.ndarray:
        with torch.no_grad():
            return model.eval()(torch.arange(40)[None]).logits.numpy()

    model = transformers.AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    assert np.isfinite(logits(model)).all()
    if adapter is not None:
        plain = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        theirs = logits(peft.PeftModel.from_pretrained(plain, adapter))
        assert np.abs(logits(model) - theirs).max() <= within * np.abs(theirs).max()
    return model
