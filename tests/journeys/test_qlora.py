"""QLoRA in each format: evaluated, generated from, merged, loaded elsewhere."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from journey import check_resumed_run, load_in_transformers
from nightly_rows import nightly_except
from runs import call, metrics, recipe_command
from safetensors import safe_open

from jaxtune.quant.format_names import format_of
from jaxtune.quant.options import QuantOptions

# Dimensions that are whole blocks in every format.
SIZES = dict(hidden_size=128, intermediate_size=256, num_attention_heads=8, num_key_value_heads=4, head_dim=32)
RANK = {"lora.rank": 4}
AS_FOR_USERS = True  # tests/conftest.py: compiled by XLA's own choice of code generator


@pytest.mark.parametrize("format", nightly_except(["nf4"], ["nf4", "fp8", "nvfp4", "int8"]))
def test_resumes_exactly_exports_and_loads(home, one_device, format):
    folder, _ = check_resumed_run(home, f"qwen_qlora_{format}.py", format, **RANK)
    leads_to_an_adapter_and_a_merged_model(home, folder, format)


def leads_to_an_adapter_and_a_merged_model(home: Path, folder: Path, format: str) -> None:
    """Checkpoints hold no base; a run evaluates in its own format only, generates, merges onto a dequantized base."""
    checkpoint = sum(file.stat().st_size for file in (folder / "checkpoints" / "8").rglob("*") if file.is_file())
    assert checkpoint < 0.5 * (home / "model" / "model.safetensors").stat().st_size  # adapters, no base
    other_format = "int8" if format != "int8" else "nf4"
    command = recipe_command(home, f"qwen_qlora_{other_format}.py", "other", **RANK)
    refused = call("jaxtune.evaluate", f"--run={folder}", *command[1:], code=2)
    assert f"quant.format: '{format}' then, '{other_format}' now" in refused
    # Devices that would split a block are left out.
    call("jaxtune.export", f"--run={folder}", f"--output={home / format}-four", "--merge", devices=4)
    call("jaxtune.generate", f"--model={folder}", "--prompt=say 3", "--chat", "--max_new_tokens=4")
    merged = home / f"{format}-merged"
    output = call("jaxtune.export", f"--run={folder}", f"--output={merged}", "--merge")
    assert "merged onto the dequantized base" in output
    largest, difference = (
        float(output.split(part)[1].split()[0].rstrip(",")) for part in ("logits, at most ", "differ by ")
    )
    assert difference <= 0.015 * largest  # rounding to bfloat16, as the recipe stores it
    with safe_open(merged / "model.safetensors", "numpy") as file:
        base = safe_open(home / "model" / "model.safetensors", "numpy")
        assert set(file.keys()) == set(base.keys())
        up = "model.layers.0.mlp.up_proj.weight"
        change = np.abs(file.get_tensor(up).astype(np.float32) - base.get_tensor(up)).max()
        assert 0 < change < 0.1  # of values around 0.02: quantization error and adapter
        four = safe_open(home / f"{format}-four" / "model.safetensors", "numpy")
        for name in file.keys():  # noqa: SIM118 (not a dict)
            np.testing.assert_array_equal(four.get_tensor(name), file.get_tensor(name), name)
    assert "quantization_config" not in json.loads((merged / "config.json").read_text())

    torch = pytest.importorskip("torch", reason="loading the results needs torch (Python 3.11 here)")
    import peft
    import transformers

    merged = transformers.AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32)
    base = transformers.AutoModelForCausalLM.from_pretrained(home / "model", dtype=torch.float32)
    quantize = jax.jit(format_of(QuantOptions(format=format), "").quantize)
    for linear in [module for module in base.model.layers.modules() if isinstance(module, torch.nn.Linear)]:
        stored = quantize(jnp.asarray(linear.weight.detach().numpy(), jnp.bfloat16))
        values = np.asarray(jax.jit(type(stored).dequantize)(stored), np.float32)
        linear.weight = torch.nn.Parameter(torch.from_numpy(values))
    theirs = peft.PeftModel.from_pretrained(base, folder / "export").merge_and_unload().state_dict()
    ours = merged.state_dict()
    assert ours.keys() == theirs.keys()
    for name, weight in ours.items():
        # The merged model is in bfloat16, as the recipe stores it: they differ by at most one rounding.
        assert torch.isclose(weight, theirs[name], rtol=2**-7, atol=1e-6).all(), name


@pytest.mark.nightly
def test_merged_into_its_base_on_the_way_it_resumes_exactly_and_the_whole_model_is_exported(home):
    options = {"lora.merge_interval": 3, "lora.reset_on_merge": True}
    folder, _ = check_resumed_run(home, "qwen_qlora_int8.py", "relora", **options)
    exported = folder / "export"
    assert (exported / "config.json").exists() and not (exported / "adapter_config.json").exists()
    load_in_transformers(exported)
    expected = [row["eval_loss"] for row in metrics(folder) if "eval_loss" in row][-1]
    evaluated = call("jaxtune.evaluate", f"--config={folder / 'config.json'}", f"--model={exported}")
    assert abs(float(evaluated.split("eval_loss ")[1].split()[0]) - expected) < 0.02
    refused = call("jaxtune.export", f"--run={folder}", f"--output={home / 'peft'}", "--format=peft", code=2)
    assert "this run merged adapters into the model (lora.merge_interval)" in refused
