"""Runs that offload all they can to the host: the same numbers, and checkpoints that runs without offload continue."""

import numpy as np
import pytest
from runs import call, metrics, recipe_command
from safetensors.numpy import load_file

# No clipping: it depends on the gradient norm, and layers are summed in another order.
OPTIONS = {"train.max_steps": 4, "eval.steps": 4, "optim.max_grad_norm": 0, "precision.recipe": "fp32"}
FULL = {f"memory.offload_{part}": True for part in ("optimizer", "master", "gradients")}
QLORA = {f"memory.offload_{part}": True for part in ("optimizer", "quants")}


def results(home, name: str, file: str):
    """Return a run's losses and exported tensors."""
    run = home / "runs" / name
    rows = [(row["step"], row.get("loss"), row.get("eval_loss")) for row in metrics(run)]
    return rows, load_file(run / "export" / file)


def same(one, other) -> None:
    assert one[0] == other[0] and one[1].keys() == other[1].keys()
    for name, value in one[1].items():
        np.testing.assert_array_equal(other[1][name], value, err_msg=name)


@pytest.mark.nightly
def test_full_training_goes_on_wherever_its_state_waits(home):
    """Each run continues from step 2 of 4 with the state in the other run's memory."""
    from_two, weights = {"ckpt.resume": 2}, "model.safetensors"
    call(*recipe_command(home, "qwen_full.py", "device", **OPTIONS))
    call(*recipe_command(home, "qwen_full.py", "host", **OPTIONS, **FULL))
    expected = results(home, "device", weights)
    same(results(home, "host", weights), expected)
    assert "resumed from step 2" in call(*recipe_command(home, "qwen_full.py", "device", **OPTIONS, **FULL, **from_two))
    assert "resumed from step 2" in call(*recipe_command(home, "qwen_full.py", "host", **OPTIONS, **from_two))
    for name in ("device", "host"):
        same(results(home, name, weights), expected)


@pytest.mark.nightly
def test_adapters_on_a_base_that_waits_are_the_same_and_merge(home):
    options, adapter = {**OPTIONS, "lora.rank": 4}, "adapter_model.safetensors"
    call(*recipe_command(home, "qwen_qlora_nf4.py", "base", **options))
    call(*recipe_command(home, "qwen_qlora_nf4.py", "waits", **options, **QLORA))
    same(results(home, "waits", adapter), results(home, "base", adapter))
    run = home / "runs" / "waits"
    flags = ("--prompt=say", "--max_new_tokens=4", "--temperature=0")
    assert call("jaxtune.generate", f"--model={run}", *flags)
    for name in ("waits", "base"):
        call("jaxtune.export", f"--run={home / 'runs' / name}", f"--output={home / name}-merged", "--merge")
    merged, expected = (load_file(home / f"{name}-merged" / "model.safetensors") for name in ("waits", "base"))
    same(([], merged), ([], expected))
