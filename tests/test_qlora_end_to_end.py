"""The QLoRA recipes with a model of the user's: train, kill, resume, evaluate, generate, merge, load elsewhere."""

import json
import re
import signal
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from runs import CONFIGS, conversations, losses, metrics, model_folder, recipe_command, run, start
from safetensors import safe_open

from jaxtune.config.schema import Quant
from jaxtune.quant import format_of

FORMATS = ("nf4", "fp8", "nvfp4", "int8")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with some conversations and a tiny Qwen3 whose matrices have whole blocks of every format."""
    folder = tmp_path_factory.mktemp("home")
    sizes = dict(hidden_size=128, intermediate_size=256, num_attention_heads=8, num_key_value_heads=4, head_dim=32)
    model_folder(folder / "model", **sizes)
    conversations(folder / "chat.jsonl")
    return folder


def command(home: Path, format: str, name: str) -> list[str]:
    return recipe_command(home, f"qwen_qlora_{format}.py", name, **{"lora.rank": 4})


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS)
def test_trains_is_killed_resumes_exactly_exports_and_loads(home, one_device, format):
    run(*command(home, format, f"{format}-whole"))
    killed = home / "runs" / f"{format}-killed"
    process = start(*command(home, format, killed.name))
    while process.poll() is None and not (
        (killed / "metrics.jsonl").exists() and '"step": 5,' in (killed / "metrics.jsonl").read_text()
    ):
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    run(*command(home, format, killed.name))
    assert losses(killed) == losses(home / "runs" / f"{format}-whole")
    found = [row["loss"] for row in metrics(killed) if "loss" in row]
    assert found[-1] < found[0]
    checkpoint = sum(file.stat().st_size for file in (killed / "checkpoints" / "8").rglob("*") if file.is_file())
    assert checkpoint < 0.5 * (home / "model" / "model.safetensors").stat().st_size  # adapters, no base

    evaluated = run("jaxtune.evaluate", f"--run={killed}", *command(home, format, killed.name)[1:])
    expected = [row["eval_loss"] for row in metrics(killed) if "eval_loss" in row][-1]
    assert abs(float(evaluated.split("eval_loss ")[1].split()[0]) - expected) <= 1e-5
    other = "int8" if format != "int8" else "nf4"
    refused = run("jaxtune.evaluate", f"--run={killed}", *command(home, other, "other")[1:], code=2)
    assert f"quant.format: '{format}' then, '{other}' now" in refused
    # A device too many for whole blocks is left out.
    run("jaxtune.export", f"--run={killed}", f"--output={home / format}-four", "--merge", devices=4)
    run("jaxtune.generate", f"--model={killed}", "--prompt=say 3", "--chat", "--max_new_tokens=4")
    merged = home / f"{format}-merged"
    output = run("jaxtune.export", f"--run={killed}", f"--output={merged}", "--merge")
    assert "merged onto the dequantized base" in output
    largest, difference = (
        float(output.split(part)[1].split()[0].rstrip(",")) for part in ("largest is ", "differ by ")
    )
    assert difference <= 0.03 * largest  # rounding to bfloat16, as the recipe stores it
    with safe_open(merged / "model.safetensors", "numpy") as file:
        base = safe_open(home / "model" / "model.safetensors", "numpy")
        assert set(file.keys()) == set(base.keys())
        up = "model.layers.0.mlp.up_proj.weight"
        change = np.abs(file.get_tensor(up).astype(np.float32) - base.get_tensor(up)).max()
        assert 0 < change < 0.1  # of values of about 0.02: a quantization and an adapter
    assert "quantization_config" not in json.loads((merged / "config.json").read_text())

    torch = pytest.importorskip("torch", reason="loading the results needs torch (Python 3.11 here)")
    import peft
    import transformers

    merged = transformers.AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32)
    base = transformers.AutoModelForCausalLM.from_pretrained(home / "model", dtype=torch.float32)
    quantize = jax.jit(format_of(Quant(format=format), "").quantize)
    for linear in [module for module in base.model.layers.modules() if isinstance(module, torch.nn.Linear)]:
        stored = quantize(jnp.asarray(linear.weight.detach().numpy(), jnp.bfloat16))
        values = np.asarray(jax.jit(type(stored).dequantize)(stored), np.float32)
        linear.weight = torch.nn.Parameter(torch.from_numpy(values))
    theirs = peft.PeftModel.from_pretrained(base, killed / "export").merge_and_unload().state_dict()
    ours = merged.state_dict()
    assert ours.keys() == theirs.keys()
    for name, weight in ours.items():
        # The merged model is in bfloat16, as the recipe stores it: at most a rounding apart.
        assert torch.isclose(weight, theirs[name], rtol=2**-7, atol=1e-6).all(), name


def test_what_cannot_be_quantized_is_refused_by_name(home):
    """A block that does not divide, and nothing left to quantize: found before a weight is read."""
    small = home / "small"
    model_folder(small, hidden_size=96)
    arguments = command(home, "nf4", "refused")
    arguments[1] = f"--config={CONFIGS / 'qwen_qlora_nf4.py'}:{small}"
    output = run(*arguments, code=2)
    assert "blocks of 1 x 64 do not divide" in output
    assert re.search(r"--config\.quant\.exclude='[a-z_|]*gate_proj\|k_proj\|", output)
    assert "Traceback" not in output
    output = run(*command(home, "nf4", "refused"), "--config.quant.skip_first_layers=2", code=2)
    assert "no linear to quantize" in output
    output = run(*command(home, "nf4", "refused"), "--config.lora.enabled=False", code=2)
    assert "quantized weights are frozen" in output
