"""What a user does with a recipe, as one harness: train, be interrupted, resume, evaluate, export, load elsewhere.

A few are trained by processes that are killed by SIGKILL and resumed. Other recipes are a row: the same commands called
in this process, interrupted by taking the newest checkpoint away.
"""

import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
from runs import call, losses, metrics, recipe_command, run, start, until_step

STEPS, KILLED_AT, SAVED = 8, 5, 6


def journey(home: Path, recipe: str, **options) -> Path:
    """A process that is killed and one that resumes have the numbers of a run in this one. Returns their folder."""
    stem = recipe.removesuffix(".py")
    call(*recipe_command(home, recipe, f"{stem}-whole", **options))
    command = recipe_command(home, recipe, f"{stem}-killed", **options)
    folder = home / "runs" / f"{stem}-killed"
    process = start(*command)
    until_step(process, folder, KILLED_AT)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert "resumed from step" in run(*command)
    assert losses(folder) == losses(home / "runs" / f"{stem}-whole")
    found = [row["loss"] for row in metrics(folder) if "loss" in row]
    assert len(found) == STEPS and found[-1] < found[0]
    evaluates_to_its_last_loss(command, folder)
    return folder


def row(home: Path, recipe: str, name: str, **options) -> tuple[Path, str]:
    """In this process: resumed from the checkpoint before its last, a run ends in equal bits. (folder, output)."""
    command = recipe_command(home, recipe, name, **{"ckpt.save_steps": SAVED, **options})
    folder = home / "runs" / name
    output = call(*command)
    whole = losses(folder)
    shutil.rmtree(folder / "checkpoints" / str(STEPS))
    shutil.rmtree(folder / "export")
    assert f"resumed from step {SAVED}" in call(*command)
    assert losses(folder) == whole
    found = [row["loss"] for row in metrics(folder) if "loss" in row]
    assert len(found) == STEPS and found[-1] < found[0]
    evaluates_to_its_last_loss(command, folder)
    return folder, output


def evaluates_to_its_last_loss(command: list[str], folder: Path) -> None:
    """`evaluate` finds the eval_loss that training ended with."""
    expected = [row["eval_loss"] for row in metrics(folder) if "eval_loss" in row][-1]
    evaluated = call("jaxtune.evaluate", f"--run={folder}", *command[1:])
    assert abs(float(evaluated.split("eval_loss ")[1].split()[0]) - expected) <= 1e-5


def loads_in_transformers(exported: Path, base: Path | None = None, adapter: Path | None = None, within: float = 0.0):
    """A model of transformers, whose logits are finite and, to `within` of the largest, those of peft's adapter."""
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
